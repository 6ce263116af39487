"""`trimtab doctor`: what this machine can do, what is missing for what, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab import __version__
from trimtab.agents import ChatTokens, check_template
from trimtab.grading import grade
from trimtab.text import install_command, printable, shorten
from trimtab.trainer.attention import causal_attention
from trimtab.trainer.model import tokenizer_at_hand
from trimtab.trainer.train import list_warm_starts
from trimtab.workers import probe_lines

State = Literal["yes", "no", "broken"]
STYLES: dict[State, str] = {"yes": "green", "no": "dim", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the screen: a capability, whether it is there, what was found or is missing, and how to get it."""

    name: str
    state: State
    found: str
    advice: str = ""


# Optional packages: the name to import, what it is for, the extra of trimtab that brings it, and the version that was
# tested, if only one was.
PACKAGES: tuple[tuple[str, str, str, str], ...] = (
    ("peft", "LoRA (model.lora_rank)", "lora", ""),
    ("vllm", "sampling with vLLM (rollout.engine, eval --engine)", "vllm", "0.32.0"),
    ("trl", "the objectives inside TRL", "trl", "1.16.0"),
    ("verl", "the objectives inside verl", "verl", "0.9.1"),
    ("datasets", "data sets and benchmarks from the hub", "hub", ""),
    ("reasoning_gym", "tasks of reasoning-gym (task.name = 'gym:...')", "gym", "0.1.25"),
    ("verifiers", "environments of verifiers (task.name = 'verifiers:...')", "verifiers", "0.3.1"),
    ("gguf", "the packaged model smollm2", "smollm2", ""),
    ("wandb", "run.loggers = ['wandb']", "wandb", ""),
    ("tensorboard", "run.loggers = ['tensorboard']", "tensorboard", ""),
    ("trackio", "run.loggers = ['trackio']", "trackio", ""),
)


def examine() -> list[Finding]:
    """Look at this machine; no check can end the command."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("device", _device),
        ("triton", _triton),
        ("attention", _attention),
        ("tokenizers", _tokenizers),
        ("grading", _grading),
        ("sandbox", _sandbox),
        *((package[0], lambda package=package: _package(*package)) for package in PACKAGES),
        ("browser", _browser),
        ("disk", _disk),
        ("warm starts", _warm_starts),
    ]
    return [_safely(name, check) for name, check in checks]


def show_doctor(console: Console) -> None:
    """Print one screen."""
    versions = f"torch {torch.__version__}, transformers {_version('transformers')}, Python {platform.python_version()}"
    console.print(f"trimtab {__version__}, {versions}, {platform.system()} {platform.machine()}", highlight=False)
    table = Table("", "", "found", "to get it", box=None, pad_edge=False)
    for finding in examine():
        state = Text(finding.state, style=STYLES[finding.state])
        found, advice = (Text(text, overflow="fold") for text in (printable(finding.found), finding.advice))
        table.add_row(finding.name, state, found, advice)  # a path is never cut short
    console.print(table)
    console.print("What a run needs in memory: trimtab train RECIPE --dry-run", highlight=False)


def show_model(console: Console, model: str) -> bool:
    """Print what can be continued exactly with a model's chat template; return whether all of it can."""
    tokenizer = tokenizer_at_hand(model)
    if tokenizer is None:
        raise ValueError(f"{model} is not on this machine yet: hf download {model} --include 'tokenizer*' '*.jinja'")
    findings = check_template(ChatTokens(tokenizer))
    console.print(f"{printable(model)}: what an agent's requests are continued with", highlight=False, markup=False)
    table = Table("", "exact", "", box=None, pad_edge=False)
    for finding in findings:
        state: State = "yes" if finding.exact else "no"
        table.add_row(finding.name, Text(state, style=STYLES[state]), Text(printable(finding.words), overflow="fold"))
    console.print(table)
    return all(finding.exact for finding in findings)


def _safely(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a half-installed package may raise anything when it is touched
        return Finding(name, "broken", shorten(f"{type(error).__name__}: {error}".replace("\n", " "), 100))


def _device() -> Finding:
    cores = os.cpu_count() or 1
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        more = f" and {count - 1} more; a run uses one unless told otherwise (--gpus {count})" if count > 1 else ""
        where = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        old = "" if gpu.major >= 8 else "bf16 is slow below capability 8.0: set model.precision = 'fp32'"
        return Finding("device", "yes", f"{where}{more}; {cores} CPU cores", old)
    built = f"torch is built for CUDA {torch.version.cuda}, but sees no GPU" if torch.version.cuda else "torch for CPUs"
    advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if torch.version.cuda else "a CUDA build of torch, for a GPU"
    return Finding("device", "no", f"no GPU ({built}): runs are on {cores} CPU cores, for small models", advice)


def _triton() -> Finding:
    found = _version("triton")
    if not found:
        lost = "no fused layers, no fused LM head, no paged sampler: a GPU would be slower"
        return Finding("triton", "no", lost, install_command("triton"))
    used = "fused layers and LM head, the paged sampler" if torch.cuda.is_available() else "unused without a GPU"
    return Finding("triton", "yes", f"{found}: {used}")


def _attention() -> Finding:
    """Run packed attention on two short sequences, on the device that a run would take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = torch.ones(5, 2, 16, device=device, dtype=torch.bfloat16)
    out = causal_attention(states, states, states, torch.tensor([0, 2, 5], device=device, dtype=torch.int32), 3)
    if not bool(torch.isfinite(out).all()):
        return Finding(
            "attention", "broken", "packed attention gives values that are not finite", "another torch build"
        )
    if device == "cuda":
        return Finding("attention", "yes", "torch's variable-length flash attention: packed sequences in bf16")
    return Finding("attention", "yes", "by sequence; flash attention and packing are for GPUs in bf16")


def _tokenizers() -> Finding:
    from trimtab.trainer.model import demo_tokenizer

    assert demo_tokenizer().decode(demo_tokenizer().encode("1+1=")) == "1+1="
    parallel = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() not in ("false", "0", "off")
    advice = "" if parallel else "TOKENIZERS_PARALLELISM is off: unset it for faster tokenizing"
    return Finding("tokenizers", "yes", _version("tokenizers"), advice)


def _grading() -> Finding:
    """Grade one answer in a worker process with its limits."""
    verdict = grade(r"\boxed{\frac{1}{2}}", "0.5", "math")
    if verdict.kind == "correct":
        return Finding("grading", "yes", "workers of their own, with limits on time, memory and processor time")
    return Finding("grading", "broken", f"1/2 for 0.5 was graded {verdict.kind}", "see docs/rewards.md")


def _sandbox() -> Finding:
    """Try the layers of the sandbox for model-written code."""
    line, *missing = probe_lines()
    level = line.partition(":")[0]
    return Finding("sandbox", "no" if missing else "yes", level, "trimtab sandbox --probe says how" if missing else "")


def _package(name: str, purpose: str, extra: str, tested: str) -> Finding:
    found = _version(name)
    if not found:
        return Finding(name, "no", purpose, install_command(extra=extra))
    other = tested and found.partition("+")[0] != tested
    return Finding(name, "yes", f"{found}: {purpose}", f"tested with {tested}" if other else "")


def _browser() -> Finding:
    """Find what takes pictures of reports; a report itself opens in any browser."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not path:
        lacking = "Chromium"
        advice = "Chromium from your system's packages"
    elif not importlib.util.find_spec("playwright"):
        lacking = "playwright"
        advice = install_command("playwright")
    else:
        return Finding("browser", "yes", f"{path}: tests and pictures of reports")
    return Finding("browser", "no", f"no {lacking}: only tests and pictures of reports need it", advice)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    low = "" if free >= 10 else "checkpoints of a run take 12 bytes per trained parameter each"
    return Finding("disk", "yes", f"{free:,.0f} GiB free in {Path.cwd()}", low)


def _warm_starts() -> Finding:
    found = list_warm_starts()
    if not found:
        return Finding("warm starts", "no", "none in the cache")
    size = sum(each.size for each in found) / 1e6
    names = ", ".join(f"{each.path.name} {each.size / 1e6:,.1f} MB" for each in reversed(found))
    return Finding(
        "warm starts",
        "yes",
        f"{len(found)}, {size:,.1f} MB in all, in {found[0].path.parent}, the last used first: " + shorten(names, 1000),
        "to remove them: trimtab doctor --remove-warm-starts",
    )


def _version(name: str) -> str:
    """Return the version of a package, empty if it is not installed; without importing it, which may take long."""
    if importlib.util.find_spec(name) is None:
        return ""
    for each in (name, name.replace("_", "-"), f"{name}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(each)
    return "of unknown version"
