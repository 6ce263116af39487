"""A damaged or hostile model folder ends in one error in words, and nothing in it runs."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.train.short_runs import short_run
from trimtab.trainer.config import load
from trimtab.trainer.memory import describe_estimate
from trimtab.trainer.model import demo_model, demo_tokenizer, load_policy

ROOT = Path(__file__).parents[2]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo model, and a chat template."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    demo_model(0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of the model to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def keys(name: str, **values: Any) -> Damage:
    """Set keys of a JSON file."""

    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def inner(name: str, change: Callable[[Any], object]) -> Damage:
    """Change what a JSON file holds, in place."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def refusal(folder: Path) -> str:
    """Return the one error that loading ends in."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_policy(str(folder), device="cpu")
    said = str(error.value)
    assert said.startswith(f"model.path={str(folder)!r}"), said
    assert "\n" not in said and said.isprintable() and len(said) < 1200
    return said


JSON_FILES = [CONFIG, "tokenizer_config.json", "tokenizer.json", "generation_config.json"]
BROKEN = {"empty": "", "cut": '{"a": [1, ', "a list": "[]", "deep": "[" * 100_000, "a number": "7", "binary": "\0\1"}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_json_file_is_named(folder: Path, name: str, kind: str) -> None:
    text(name, BROKEN[kind])(folder)
    assert name in refusal(folder)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "hidden_size 10**12": (keys(CONFIG, hidden_size=10**12), "hidden_size=1000000000000"),
    "hidden_size -1": (keys(CONFIG, hidden_size=-1), "hidden_size=-1"),
    "hidden_size text": (keys(CONFIG, hidden_size="\x1b[31mwide"), "hidden_size"),
    "hidden_size for another model": (keys(CONFIG, hidden_size=128), "do not fit config.json"),
    "hidden_size for a model of terabytes": (keys(CONFIG, hidden_size=1 << 20), "parameters or more, the weights"),
    "vocab_size 0": (keys(CONFIG, vocab_size=0), "vocab_size=0"),
    "vocab_size too small": (keys(CONFIG, vocab_size=5), "do not fit config.json"),
    "layers without end": (keys(CONFIG, num_hidden_layers=10**9, layer_types=None), "num_hidden_layers"),
    "layers that the weights lack": (
        keys(CONFIG, num_hidden_layers=3, layer_types=["full_attention"] * 3), "the weights lack 11 tensors",
    ),
    "heads that do not divide": (keys(CONFIG, num_attention_heads=3), CONFIG),
    "no head": (keys(CONFIG, num_attention_heads=0), "num_attention_heads=0"),
    "an unknown family": (keys(CONFIG, model_type="nothing"), "nothing"),
    "a family of another kind": (keys(CONFIG, model_type="vit"), "ViTConfig"),
    "a family that is no text": (keys(CONFIG, model_type=["qwen3"]), CONFIG),
    "an unknown activation": (keys(CONFIG, hidden_act="boom"), "boom"),
    "a rotary embedding of text": (keys(CONFIG, rope_parameters="x"), CONFIG),
    "a kernel from the hub": (keys(CONFIG, attn_implementation="evil/attention"), "evil/attention"),
    "weights elsewhere": (keys(CONFIG, transformers_weights="../evil.bin"), "evil.bin"),
    "an end token beyond the vocabulary": (keys("generation_config.json", eos_token_id=99), "99"),
    "an end token of text": (keys("generation_config.json", eos_token_id=["x"]), "'x'"),
    "no end token": (
        lambda folder: (keys("generation_config.json", eos_token_id=None)(folder),
                        keys("tokenizer_config.json", eos_token=None)(folder)),
        "responses would never end",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no .safetensors file"),
    "empty weights": (text(WEIGHTS, ""), WEIGHTS),
    "cut weights": (lambda folder: os.truncate(folder / WEIGHTS, 1000), WEIGHTS),
    "a header of 2^60 bytes": (
        lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), WEIGHTS,
    ),
    "a tensor beyond the file": (
        lambda folder: (folder / WEIGHTS).write_bytes(
            struct.pack("<Q", 59) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}  '), WEIGHTS,
    ),
    "a missing tensor": (tensors(lambda weights: weights.pop("model.norm.weight")), "lack 1 tensors of Qwen3"),
    "a tensor of another shape": (
        tensors(lambda weights: weights.update({"model.norm.weight": torch.ones(3)})),
        "model.norm.weight is [3] in the file, [64] by config.json",
    ),
    "NaN": (tensors(lambda weights: weights["model.norm.weight"].fill_(torch.nan)), "NaN, in model.norm.weight"),
    "infinity": (
        tensors(lambda weights: weights["model.embed_tokens.weight"][3].fill_(torch.inf)), "infinite or NaN"),
    "an index of pickles": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "part.safetensors"),
            text("model.safetensors.index.json", '{"weight_map": {"a": "evil.bin"}}')(folder)),
        "evil.bin",
    ),
    "an index of other folders": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "part.safetensors"),
            text("model.safetensors.index.json", '{"weight_map": {"a": "/etc/x.safetensors"}}')(folder)),
        "/etc/x.safetensors",
    ),
    "an index of shards that are not there": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "part.safetensors"),
            text("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')(folder)),
        "b.safetensors",
    ),
    "an index without a map": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "part.safetensors"),
            text("model.safetensors.index.json", '{"metadata": {}}')(folder)),
        "model.safetensors.index.json",
    ),
    "an adapter": (text("adapter_config.json", '{"base_model_name_or_path": "evil/base"}'), "merge_and_unload"),
    "a pipe": (lambda folder: ((folder / CONFIG).unlink(), os.mkfifo(folder / CONFIG)), "no regular file"),
    "a link to nowhere": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to("/nowhere")), "no regular file"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "a tokenizer without a vocabulary": (inner("tokenizer.json", lambda t: t["model"].pop("vocab")), "tokenizer.json"),
    "token ids of text": (inner("tokenizer.json", lambda t: t["model"].update(vocab={"a": "x"})), "tokenizer.json"),
    "token ids of 2^40": (inner("tokenizer.json", lambda t: t["model"].update(vocab={"a": 1 << 40})), "tokenizer.json"),
    "an unknown kind of tokenizer": (inner("tokenizer.json", lambda t: t["model"].update(type="x")), "tokenizer.json"),
    "an unknown pre-tokenizer": (inner("tokenizer.json", lambda t: t.update(pre_tokenizer=5)), "tokenizer.json"),
    "a bad expression": (
        inner("tokenizer.json", lambda t: t["pre_tokenizer"].update(pattern={"Regex": "("})), "tokenizer.json"),
    "an end token that is a list": (keys("tokenizer_config.json", eos_token=["x"]), "tokenizer"),
    "a tokenizer's class that is a number": (keys("tokenizer_config.json", tokenizer_class=5), "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_model_is_refused_in_words(folder: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    damage(folder)
    assert words in refusal(folder)


# Code that comes with a model.

MARK = "import pathlib; pathlib.Path(__file__).with_name('RAN').touch(); pathlib.Path('RAN').touch()\n"
MODELING = (
    MARK
    + """
from transformers import PreTrainedTokenizerFast, Qwen3Config as Config, Qwen3ForCausalLM as Model
class Config(Config): model_type = "evil"
class Tokenizer(PreTrainedTokenizerFast): pass
"""
)


def mine(folder: Path) -> None:
    """Put Python into every place of a model's folder from which some version of transformers runs it."""
    for name in ("modeling_evil", "tokenization_evil", "configuration_evil", "generate", "conftest", "sitecustomize"):
        (folder / f"{name}.py").write_text(MODELING)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(MODELING + "def generate(*args, **options): ...\n")
    (folder / "requirements.txt").write_text("evil-package\n")
    auto = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    keys(CONFIG, auto_map=auto, custom_generate="custom_generate")(folder)
    keys("generation_config.json", auto_map=auto, custom_generate=".")(folder)
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "modeling_evil.P"}}))
    (folder / "quantize_config.json").write_text("{}")


class Touch:
    """A pickle that runs code when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/RAN",)


def nothing_ran(*folders: Path) -> bool:
    return not any(path.exists() for folder in folders for path in folder.rglob("RAN"))


@pytest.fixture
def answers_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer every question with yes, and count none: there must not be one."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))


@pytest.mark.usefixtures("answers_yes")
@pytest.mark.parametrize("unknown", [CONFIG, "tokenizer_config.json"])
def test_a_model_that_needs_its_own_code_is_refused_and_none_of_it_runs(
    folder: Path, tmp_path: Path, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine(folder)
    if unknown == CONFIG:
        keys(CONFIG, model_type="evil")(folder)
    else:
        names = {"AutoTokenizer": ["modeling_evil.Tokenizer", None]}
        keys("tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=names)(folder)
        keys(CONFIG, model_type="smollm3", no_rope_layers=[1, 1])(folder)  # a family without a tokenizer of its own
    said = refusal(folder)
    assert "runs no code that comes with a model" in said and "a family that transformers has built in" in said
    assert nothing_ran(folder, tmp_path)


@pytest.mark.usefixtures("answers_yes")
def test_a_family_of_transformers_is_loaded_by_transformers_own_code(folder: Path, tmp_path: Path) -> None:
    mine(folder)
    policy = load_policy(str(folder), device="cpu")
    assert type(policy.model).__module__.startswith("transformers.")
    assert nothing_ran(folder, tmp_path)


@pytest.mark.usefixtures("answers_yes")
def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Touch(folder)))
    assert "pickled weights" in refusal(folder)
    assert nothing_ran(folder)


@pytest.mark.usefixtures("answers_yes")
def test_a_dry_run_says_that_a_model_needs_code_and_runs_none(folder: Path) -> None:
    mine(folder)
    keys(CONFIG, model_type="evil")(folder)
    (line,) = describe_estimate(load("addition", [f"model.path={folder}"]))
    assert "no estimate" in line and "runs no code that comes with a model" in line
    assert nothing_ran(folder)


@pytest.mark.parametrize("command", [["train", "demo", "--set"], ["train", "demo", "--dry-run", "--set"], ["eval"]])
@pytest.mark.slow
def test_a_command_asks_nothing(folder: Path, tmp_path: Path, command: list[str]) -> None:
    mine(folder)
    keys(CONFIG, model_type="evil")(folder)
    model = [f"model.path={folder}"] if command[0] == "train" else [str(folder), "--benchmark", "gsm8k"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *command, *model], input="y\n" * 9, capture_output=True, text=True,
        cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "[y/N]" not in done.stdout + done.stderr
    assert nothing_ran(folder, tmp_path)


def test_names_of_tensors_reach_the_terminal_escaped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors(lambda weights: weights.update({"\x1b]0;title\x07": torch.ones(1)}))(folder)
    with pytest.warns(UserWarning, match="does not use 1 tensors of the weights, such as .x1b.0;title.x07") as warned:
        load_policy(str(folder), device="cpu")
    assert all(str(warning.message).isprintable() for warning in warned)
    assert "\x1b]" not in capfd.readouterr().err


def from_pretrained_calls(source: Path) -> list[tuple[int, ast.Call]]:
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    named = {"from_pretrained", "from_config"}
    return [(call.lineno, call) for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in named]


def test_every_call_that_loads_a_model_forbids_remote_code() -> None:
    """Left out, transformers asks on standard input."""
    checked = 0
    for folder in ("src", "benchmarks", "examples", "scripts", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            for line, call in from_pretrained_calls(file):
                values = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert values.get("trust_remote_code") == "False", f"{file}:{line}"
                checked += 1
            assert "trust_remote_code=True" not in file.read_text()
    assert checked > 8


# --- a model that is not here


@pytest.mark.parametrize("path", ["a/b/c", "./mine", "~/nothing here", "models/../mine", "runs/mine@3", "my model"])
def test_what_looks_like_a_path_is_never_looked_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="there is no such folder"):
        load_policy(path, device="cpu")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise ConnectionError("no route\x1b[0m to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    with pytest.raises(ValueError, match=r"the Hugging Face hub .*ConnectionError: no route\\x1b"):
        load_policy("nobody/nothing", device="cpu")
    assert len(asked) == 1
    assert "nobody/nothing" in asked[0][0]
    assert asked[0][1] <= 10


def test_a_run_says_that_its_model_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run, log = short_run(tmp_path / "run", {"model.path": "nobody/nothing", "warm_start.steps": "0"})
    with pytest.raises(ValueError, match="nobody/nothing"):
        run.prepare()
    assert log.has("'nobody/nothing' is no folder here: it is looked up on the Hugging Face hub")
    run.discard_if_unused()
