"""Pack vLLM, TRL and verl for a GPU machine without network, from an environment in which they are installed.

The pack has what an import of them loads, without the packages that the machine has itself (`--have`) and without
large files that a Hopper GPU does not use. It is a .tar.xz in pieces:

    python benchmarks/pack_peers.py --python ENV/bin/python --out FOLDER
    cat FOLDER/peers.* | tar -xJ -C PEERS        # on the GPU machine
    PYTHONPATH=PEERS:src python benchmarks/on_gpu.py

The environment needs the machine's Python, torch and transformers. So `pip install --no-deps` vLLM and verl there, and
then what they require.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

IMPORTS = {
    "vllm": (
        "vllm.entrypoints.llm", "vllm.entrypoints.*", "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen3", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.gpu_worker",
    ),
    "trl": ("trl.trainer.grpo_trainer",),
    "verl": (
        "ray.util.state", "verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl.workers.engine_workers",
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
    ),
}  # fmt: skip
HAVE = (
    "accelerate", "cuda-*", "huggingface_hub", "jinja2", "mpmath", "networkx", "numpy", "nvidia-*", "pip", "pyarrow",
    "safetensors", "setuptools", "sympy", "tokenizers", "torch", "transformers", "trimtab", "triton",
    "typing_extensions",
)  # fmt: skip
# FlashAttention 2 and Blackwell's kernels, headers, a server in Rust, Ray's page and Java parts, tests, commands.
UNUSED = (
    "*/_vllm_fa2_C*", "*/_flashmla*", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "*.hpp", "*.cuh",
    "vllm/vllm-rs", "ray/dashboard/client/*", "ray/jars/*", "*/tests/*", "*.pyi", "*__pycache__/*", "../../../*",
)  # fmt: skip
# Runs in the environment: the distributions of all modules that the imports load, and their files. `NAME.*` stands for
# all modules below a package: vLLM's server imports its routes when it is built, long after the start.
FIND = """
import importlib, json, pkgutil, sys, warnings
from importlib.metadata import distribution, packages_distributions
warnings.simplefilter("ignore")
failed = {}
names = sys.argv[1:]
while names:
    below = names[0].endswith(".*")
    name = names.pop(0).removesuffix(".*")
    try:
        module = importlib.import_module(name)
        if below:
            names += [each.name for each in pkgutil.walk_packages(module.__path__, name + ".", failed.get)]
    except Exception as error:
        failed[name] = repr(error)
owners = packages_distributions()
found = {owner for name in {module.partition(".")[0] for module in sys.modules} for owner in owners.get(name, [])}
files = {name: [[str(file), str(file.locate())] for file in distribution(name).files or []] for name in sorted(found)}
print("FOUND" + json.dumps({"failed": failed, "files": files}))
"""


def loaded(python: Path, modules: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the files of all packages that importing some modules loads, by package."""
    done = subprocess.run([python, "-c", FIND, *modules], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    for name, error in found["failed"].items():
        print(f"not imported, so packages of it may be missing: {name}: {error:.200}")
    files: dict[str, list[list[str]]] = found["files"]
    return files


def packed(files: dict[str, list[list[str]]], have: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files to pack: their names in the pack, and where they are."""
    for package, names in files.items():
        if any(fnmatch(package.lower().replace("-", "_"), pattern.lower().replace("-", "_")) for pattern in have):
            continue
        for name, place in names:
            if not any(fnmatch(name, pattern) for pattern in UNUSED) and Path(place).is_file():
                yield name, Path(place)


def main(arguments: Sequence[str] | None = None) -> None:
    """Find, pack, and cut into pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment with the peers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs="+", default=[*IMPORTS], choices=[*IMPORTS])
    parser.add_argument("--have", nargs="+", default=HAVE, help="packages of the machine, with * as in file names")
    parser.add_argument("--piece", type=int, default=48, help="megabytes of a piece")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    files = loaded(args.python, [module for peer in args.peers for module in IMPORTS[peer]])
    whole = args.out / "peers.tar.xz"
    with tarfile.open(whole, "w:xz") as tar:
        count = 0
        for name, place in packed(files, args.have):
            tar.add(place, name, recursive=False)
            count += 1
    size, piece = whole.stat().st_size, args.piece * 1_000_000
    with whole.open("rb") as file:
        for number in range(-(-size // piece)):
            (args.out / f"peers.{number:02d}").write_bytes(file.read(piece))
    whole.unlink()
    print(f"{count} files of {len(files)} packages, {size / 1e6:.0f} MB, in {-(-size // piece)} pieces")


if __name__ == "__main__":
    main()
