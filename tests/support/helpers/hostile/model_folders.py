"""Model folders that try to run code when a model or tokenizer is loaded from them.

Each is a copy of a small model that loads, with something added or replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.hostile.traps import Traps, change_json, words, write_json

Attack = Callable[[Path, Traps, str], None]
MODULE = "modeling_trap"
BIN_FORMS = [("zip", "open"), ("zip", "system"), ("zip", "exec"), ("zip", "eval"), ("zip", "import")]
BIN_FORMS += [("legacy", "open"), ("legacy", "system"), ("tar", "open")]
# Auto classes of transformers that a config file may map to a class of the folder's own.
AUTO = words("""AutoConfig AutoModel AutoModelForCausalLM AutoModelForPreTraining AutoModelForImageTextToText
AutoModelForSeq2SeqLM AutoTokenizer AutoProcessor AutoImageProcessor AutoFeatureExtractor AutoVideoProcessor""")
CONFIGS = words("""config.json tokenizer_config.json generation_config.json processor_config.json
preprocessor_config.json video_preprocessor_config.json special_tokens_map.json adapter_config.json
chat_template.json""")
BESIDE = words("""pytorch_model.bin training_args.bin optimizer.pt optimizer.bin scheduler.pt rng_state.pth scaler.pt
consolidated.00.pth adapter_model.bin pytorch_lora_weights.bin model.pt model.pth model.pkl model.pickle
model.ckpt model.joblib vocab.pkl tokenizer.pkl tokenizer.model spiece.model merges.pkl config.pkl
global_step1.pt state.pt pytorch_model.fp32.bin open_clip_pytorch_model.bin diffusion_pytorch_model.bin
tf_model.h5 flax_model.msgpack pytorch_model-00001-of-00001.bin model.npz model.npy data.pkl""")


def base_model(folder: Path) -> Path:
    """Make a small Llama with a tokenizer of single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<eos>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=len(letters) + 1, eos_token_id=256, bos_token_id=256, pad_token_id=256)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build(base: Path, folder: Path, traps: Traps, name: str, attack: Attack) -> Path:
    """Copy the base model and add an attack under a name."""
    shutil.copytree(base, folder)
    attack(folder, traps, name)
    return folder


def attacks() -> dict[str, Attack]:
    """Return all attacks by name."""
    return {**_remote_code(), **_pickles(), **_names(), **_adapters()}


def _code(folder: Path, traps: Traps, name: str) -> None:
    """Write the Python files that remote code may be in."""
    for file in (f"{MODULE}.py", "configuration_trap.py", "tokenization_trap.py", "__init__.py", "generate.py"):
        (folder / file).write_text(traps.python(name))
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(traps.python(name))
    (folder / "requirements.txt").write_text("trimtab\n")


def _remote_code() -> dict[str, Attack]:
    made: dict[str, Attack] = {}

    def mapped(file: str, mapping: Any, **more: Any) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            _code(folder, traps, name)
            change_json(folder / file, **({"auto_map": mapping} if mapping else {}), **more)

        return attack

    for auto in AUTO:
        made[f"config.json maps {auto}"] = mapped("config.json", {auto: f"{MODULE}.ModelClass"})
    everything = dict.fromkeys(AUTO, f"{MODULE}.ModelClass")
    for file in CONFIGS:
        made[f"{file} maps every class"] = mapped(file, everything)
        made[f"{file} maps every class, of an unknown kind"] = mapped(
            file, everything, model_type="trap", tokenizer_class="TrapTokenizer", architectures=["TrapForCausalLM"]
        )
    pair = {"AutoTokenizer": [f"{MODULE}.TokenizerClass", f"{MODULE}.TokenizerClass"]}
    made["a slow and a fast tokenizer"] = mapped("tokenizer_config.json", pair, tokenizer_class="TrapTokenizer")
    only_slow = {"AutoTokenizer": [f"{MODULE}.TokenizerClass", None]}
    made["a slow tokenizer only"] = mapped("tokenizer_config.json", only_slow, tokenizer_class="TrapTokenizer")
    made["a list as map"] = mapped("tokenizer_config.json", [f"{MODULE}.TokenizerClass", None], tokenizer_class="Trap")
    made["nested maps"] = mapped("config.json", None, text_config={"auto_map": everything, "model_type": "trap"})
    made["generation by the folder's function"] = mapped(
        "generation_config.json", None, custom_generate=".", trust_remote_code=True
    )
    made["trust said in the config"] = mapped(
        "config.json", everything, model_type="trap", trust_remote_code=True, code_revision="main"
    )
    made["trust said in the tokenizer's config"] = mapped(
        "tokenizer_config.json", everything, tokenizer_class="Trap", trust_remote_code=True
    )

    def elsewhere(folder: Path, traps: Traps, name: str) -> None:
        _code(folder, traps, name)
        other = folder.parent / f"{folder.name}-other"
        shutil.copytree(folder, other)
        mapping = dict.fromkeys(AUTO, f"{other}--{MODULE}.ModelClass")
        change_json(folder / "config.json", auto_map=mapping, model_type="trap", _name_or_path=str(other))

    made["code of another folder"] = elsewhere

    def dotted(folder: Path, traps: Traps, name: str) -> None:
        _code(folder, traps, name)
        change_json(folder / "config.json", auto_map=dict.fromkeys(AUTO, f"../{folder.name}/{MODULE}.ModelClass"))

    made["a path in the map"] = dotted
    return made


def _pickles() -> dict[str, Attack]:
    made: dict[str, Attack] = {}

    def weights(file: str, form: str, how: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            (folder / "model.safetensors").unlink()
            (folder / file).write_bytes(traps.torch_file(name, form, how))

        return attack

    for form, how in BIN_FORMS:
        made[f"pytorch_model.bin, {form}, {how}"] = weights("pytorch_model.bin", form, how)
    made["model.safetensors is torch's zip"] = weights("model.safetensors", "zip", "open")

    def raw(file: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            (folder / "model.safetensors").unlink()
            (folder / file).write_bytes(traps.pickled(name))

        return attack

    for file in ("pytorch_model.bin", "model.safetensors", "tf_model.h5", "flax_model.msgpack", "model.gguf"):
        made[f"{file} is a bare pickle"] = raw(file)

    def shards(index: str, shard: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            (folder / "model.safetensors").unlink()
            (folder / shard).write_bytes(traps.torch_file(name))
            keys = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
            write_json(folder / index, {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, shard)})

        return attack

    made["shards in .bin"] = shards("pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin")
    made["shards of safetensors are pickles"] = shards("model.safetensors.index.json", "shard.bin")
    made["shards outside of the folder"] = shards("model.safetensors.index.json", "../shard-outside.bin")

    def named_weights(folder: Path, traps: Traps, name: str) -> None:
        (folder / "weights.bin").write_bytes(traps.torch_file(name))
        change_json(folder / "config.json", transformers_weights="weights.bin")

    made["the config names a pickle as weights"] = named_weights

    def metadata(folder: Path, traps: Traps, name: str) -> None:
        from safetensors.torch import load_file, save_file

        hidden = {
            "format": "pt",
            "py/object": "os.system",
            "pickle": traps.pickled(name).hex(),
            "code": traps.python(name),
        }
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", hidden)

    made["a pickle inside of safetensors"] = metadata

    def beside(folder: Path, traps: Traps, name: str) -> None:
        for i, file in enumerate(BESIDE):
            data = traps.numpy_file if file.endswith((".npy", ".npz")) else traps.torch_file if i % 2 else traps.pickled
            (folder / file).write_bytes(data(f"{name}: {file}"))

    made["pickles beside good weights"] = beside
    return made


def _names() -> dict[str, Attack]:
    """Return folders whose fields name functions or hold code where a name is looked up."""
    made: dict[str, Attack] = {}

    def field(file: str, **changes: Any) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            _code(folder, traps, name)
            text = json.dumps(changes).replace("CODE", traps.expression(name).replace('"', '\\"'))
            change_json(folder / file, **json.loads(text.replace("FOLDER", str(folder))))

        return attack

    config = {
        "architectures": ["__import__('os').system"],
        "model_type": "CODE",
        "dtype": "CODE",
        "torch_dtype": "serialization.os.system",
        "hidden_act": "CODE",
        "rope_parameters": {"rope_type": "CODE", "rope_theta": 1e4},
        "_attn_implementation": "FOLDER",
        "attn_implementation": "FOLDER:generate",
        "_attn_implementation_internal": "trap/kernel:generate",
        "_experts_implementation": "CODE",
        "quantization_config": {"quant_method": "CODE", "modules_to_not_convert": ["CODE"]},
        "kernel_config": {"kernel_mapping": {"RMSNorm": "FOLDER:generate"}},
        "use_kernels": True,
        "base_model_tp_plan": {"layers.*": "CODE"},
        "transformers_version": "CODE",
        "id2label": {"CODE": "CODE"},
        "problem_type": "CODE",
        "tokenizer_class": "CODE",
        "__class__": "os.system",
        "py/object": "os.system",
        "py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["CODE"]}],
    }
    for key, value in config.items():
        made[f"config.json: {key}"] = field("config.json", **{key: value})
    tokenizer = {
        "tokenizer_class": "CODE",
        "tokenizer_file": "FOLDER/generate.py",
        "vocab_file": "FOLDER/generate.py",
        "tokenizer_object": {"py/object": "os.system"},
        "extra_special_tokens": {"CODE": "CODE"},
        "model_input_names": ["CODE"],
        "eos_token": {"__type": "AddedToken", "content": "CODE", "__class__": "os.system"},
        "added_tokens_decoder": {"256": {"content": "CODE", "__type": "os.system"}},
        "response_schema": {"x-parser": "CODE", "x-regex": "CODE"},
        "backend": "CODE",
        "processor_class": "CODE",
    }
    for key, value in tokenizer.items():
        made[f"tokenizer_config.json: {key}"] = field("tokenizer_config.json", **{key: value})
    fields = {
        "pre_tokenizer": {"type": "Custom", "py/object": "CODE"},
        "normalizer": {"type": "Python", "code": "CODE"},
        "decoder": {"type": "CODE"},
        "post_processor": {"type": "TemplateProcessing", "single": ["CODE"], "pair": [], "special_tokens": {}},
    }
    for key, value in fields.items():
        made[f"tokenizer.json: {key}"] = field("tokenizer.json", **{key: value})
    made["generation_config.json: fields"] = field(
        "generation_config.json", cache_implementation="CODE", watermarking_config={"CODE": 1}, assistant_model="FOLDER"
    )
    made["generation_config.json: stop strings and processors"] = field(
        "generation_config.json", stop_strings=["CODE"], logits_processor=["CODE"], compile_config={"backend": "CODE"}
    )
    return made


def _adapters() -> dict[str, Attack]:
    made: dict[str, Attack] = {}

    def adapter(weights: str, **changes: Any) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            _code(folder, traps, name)
            basis = folder.parent / f"{folder.name}-basis"
            shutil.copytree(folder, basis)
            for file in ("config.json", "model.safetensors", "generation_config.json"):
                (folder / file).unlink()
            about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
            text = json.dumps(changes).replace("CODE", traps.expression(name))
            write_json(
                folder / "adapter_config.json", {**about, "base_model_name_or_path": str(basis), **json.loads(text)}
            )
            (folder / weights).write_bytes(traps.torch_file(name))

        return attack

    made["adapter_model.bin"] = adapter("adapter_model.bin")
    made["adapter_model.safetensors is a pickle"] = adapter("adapter_model.safetensors")
    mapping = {"base_model_class": "ModelClass", "parent_library": MODULE}
    made["an adapter's mapping"] = adapter("adapter_model.bin", auto_mapping=mapping)
    made["an adapter's mapping to os"] = adapter(
        "adapter_model.bin", auto_mapping={"base_model_class": "system", "parent_library": "os"}
    )
    made["an adapter's megatron"] = adapter("adapter_model.bin", megatron_core=MODULE, megatron_config={"x": 1})
    made["an adapter's kinds"] = adapter("adapter_model.bin", peft_type="CODE", task_type="CODE")
    made["an adapter's patterns"] = adapter("adapter_model.bin", rank_pattern={"CODE": 1}, init_lora_weights="CODE")

    def basis_with_code(folder: Path, traps: Traps, name: str) -> None:
        adapter("adapter_model.bin")(folder, traps, name)
        basis = folder.parent / f"{folder.name}-basis"
        change_json(basis / "config.json", auto_map=dict.fromkeys(AUTO, f"{MODULE}.ModelClass"), model_type="trap")

    made["an adapter whose basis has code"] = basis_with_code
    return made
