"""The papers' recipes for large models say how much memory eight GPUs must have: what `--dry-run` forecasts.

`TRIMTAB_THOROUGH=1` forecasts all of them; without it, the smallest model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.thorough import slow_but
from trimtab.trainer.config import load, packaged_recipes
from trimtab.trainer.memory.advice import describe_estimate

# Of the models' config.json: layers, width, heads, heads of keys and values, width of the MLP, vocabulary.
SHAPES = {
    "Qwen/Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5-14B": (48, 5120, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064),
    "Qwen/Qwen3-8B": (36, 4096, 32, 8, 12288, 151936),
    "Qwen/Qwen3-14B": (40, 5120, 40, 8, 17408, 151936),
}
KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
STATED = r"Use eight GPUs of one machine, with (\d+) GB or more each:\n#   (--gpus 8 --set model.shard=true)\n"
LARGE = {name: match for name, path in packaged_recipes().items() if (match := re.search(STATED, path.read_text()))}


def test_every_recipe_of_a_large_model_states_it() -> None:
    models = {name: load(name).model.path for name in packaged_recipes()}
    assert set(LARGE) == {name for name, model in models.items() if re.search(r"(?<![\d.])(7|8|14|32)B", model)}


@pytest.mark.parametrize("name", slow_but(["sspo-qwen2.5-math-7b"], LARGE))
def test_a_recipe_needs_of_each_gpu_what_it_states(name: str, tmp_path: Path) -> None:
    model = load(name).model.path
    shape = next(shape for known, shape in SHAPES.items() if model.replace("-Math", "").startswith(known))
    kind = "qwen3" if "Qwen3" in model else "qwen2"
    config = dict(zip(KEYS, shape, strict=True)) | {"model_type": kind, "head_dim": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    settings = [f'model.path="{tmp_path}"', "model.shard=true", "run.device=cuda"]
    forecast = "\n".join(describe_estimate(load(name, settings), gpus=8))
    needed = re.search(r"so the run needs ([\d.]+) GB of each GPU's memory", forecast)
    assert needed is not None, forecast
    assert round(float(needed[1])) == int(LARGE[name][1])
