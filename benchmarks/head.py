"""The LM head on a GPU: loss and gradients by hidden states and head, trimtab's beside others', in one process.

Every implementation gets the same bf16 tensors and the same PPO-clip loss over the log-probabilities. The floor is the
three GEMMs alone (logits, gradient by hidden states, gradient by the head) on all rows at once. Others come from a
folder into which their wheels were unpacked (`--peers`); one that cannot be run is listed with its error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from result_file import about, save
from trimtab.trainer.model.lm_head import Head, head_gradients, head_scores

VOCABULARY = 151_936
SHAPES = ((8192, 2048), (8192, 4096), (32768, 2048))
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
PAUSE = 0.15  # seconds after which a GPU's clock has recovered

Implementation = Callable[[], tuple[Tensor, Tensor, Tensor]]  # loss, d hidden, d weight


class Case:
    """Tensors of one shape, and the loss that all implementations share."""

    def __init__(self, rows: int, width: int, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.rows, self.width, self.vocabulary = rows, width, vocabulary
        self.hidden = torch.randn(rows, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.randn(vocabulary, width, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.05
        self.token = torch.randint(0, vocabulary, (rows,), generator=generator, device="cuda")
        self.advantage = torch.randn(rows, generator=generator, device="cuda")
        old = head_scores(self.hidden, Head(self.weight), self.token).logp
        self.old_logp = old + 0.1 * torch.randn(rows, generator=generator, device="cuda")

    def loss(self, logp: Tensor, rows: slice = slice(None)) -> Tensor:
        """PPO-clip, averaged over all rows."""
        ratio = (logp - self.old_logp[rows]).exp()
        advantage = self.advantage[rows]
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return -torch.minimum(ratio * advantage, clipped * advantage).sum() / self.rows

    def loss_and_grad(self, logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the loss of some rows and d loss / d log-prob."""
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            loss = self.loss(leaf, rows)
            (grad_logp,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad_logp

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return hidden states and head as leaves of a new graph."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def in_fp64(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss and gradients in fp64."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        loss = self.loss((hidden @ weight.T).log_softmax(-1).gather(1, self.token[:, None]).squeeze(1))
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return loss.detach(), hidden.grad, weight.grad

    def by_autograd(self, logp_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss and gradients of an implementation that returns log-probabilities."""
        hidden, weight = self.leaves()
        loss = self.loss(logp_of(hidden, weight))
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return loss.detach(), hidden.grad, weight.grad


def ours(case: Case) -> Implementation:
    """trimtab's head."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        made = head_gradients(case.hidden, Head(case.weight), case.token, case.loss_and_grad)
        assert made.weight is not None
        return made.loss, made.hidden, made.weight

    return run


def floor(case: Case) -> Implementation:
    """The three GEMMs and nothing else."""
    logits = torch.empty(case.rows, case.vocabulary, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        torch.mm(case.hidden, case.weight.T, out=logits)
        return logits[0, 0], logits @ case.weight, logits.T @ case.hidden

    return run


def full_logits(case: Case) -> Implementation:
    """torch with all logits in fp32."""

    def logp_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(1, case.token[:, None]).squeeze(1)

    return lambda: case.by_autograd(logp_of)


def compiled(case: Case) -> Implementation:
    """torch.compile in chunks of 2,048 rows, each recomputed in the backward pass."""

    @torch.compile
    def piece(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
        logits = (hidden @ weight.T).float()
        return logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(-1)

    def logp_of(hidden: Tensor, weight: Tensor) -> Tensor:
        pieces = zip(hidden.split(2048), case.token.split(2048), strict=True)
        return torch.cat([checkpoint(piece, h, weight, t, use_reentrant=False) for h, t in pieces])

    return lambda: case.by_autograd(logp_of)


def verl_kernel(case: Case) -> Implementation:
    """verl's Triton kernel, which returns entropy too."""
    apply = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda: case.by_autograd(lambda h, w: apply(h, w, case.token, 1.0, "none", None)[0])


def verl_chunked(case: Case) -> Implementation:
    """verl's chunked head in torch, which returns entropy too."""
    head = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    return lambda: case.by_autograd(lambda h, w: head(h, w, case.token)[0])


def liger(case: Case) -> Implementation:
    """Liger's fused linear GRPO loss, over responses of 1,024 tokens."""
    torch._dynamo.reset()  # what it compiles for one shape fails with the third
    module = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="bnpo"
    )
    shape = (case.rows // 1024, 1024)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = case.leaves()
        made = module(
            hidden.view(*shape, -1),
            weight,
            case.token.view(shape),
            torch.ones(shape, device="cuda"),
            case.advantage.view(shape)[:, 0].contiguous(),  # it takes one advantage per response
            old_per_token_logps=case.old_logp.view(shape),
        )
        loss = made[0] if isinstance(made, tuple) else made
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return loss.detach(), hidden.grad, weight.grad

    return run


IMPLEMENTATIONS: dict[str, Callable[[Case], Implementation]] = {
    "floor": floor,
    "trimtab": ours,
    "torch, full logits": full_logits,
    "torch.compile + checkpointing": compiled,
    "verl, Triton": verl_kernel,
    "verl, chunked": verl_chunked,
    "Liger": liger,
}


def milliseconds(runs: Sequence[Implementation], rounds: int, pause: float = 0.0) -> list[float]:
    """Return medians over rounds that alternate between the implementations, after two warm-up rounds.

    With a pause (seconds) before each run the GPU's clock recovers; without one the power limit lowers it.
    """
    # Alternating: clocks fall with heat, so whatever is timed first would look faster than it is.
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 2):
        for run, mine in zip(runs, times, strict=True):
            time.sleep(pause)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            mine.append(start.elapsed_time(end))
    return [statistics.median(mine[2:]) for mine in times]


def peak_gigabytes(run: Implementation) -> float:
    """Return the peak of memory while it runs, beyond what was allocated before and the head's gradient."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - made[2].nbytes) / 1e9


def measure(rows: int, width: int, rounds: int, slow: int) -> dict[str, Any]:
    """Measure every implementation at one shape, each alternating with the floor."""
    case = Case(rows, width)
    result: dict[str, Any] = {}
    for name, make in IMPLEMENTATIONS.items():
        if name == "floor":
            continue
        torch.cuda.empty_cache()
        try:
            run = make(case)
            least, took = milliseconds([floor(case), run], rounds if name == "trimtab" else slow)
            result[name] = {"ms": round(took, 2), "floor_ms": round(least, 2), "to_floor": round(took / least, 3)}
            if name == "trimtab":
                rested, apart = milliseconds([floor(case), run], rounds, PAUSE)
                result[name] |= {"rested_ms": round(apart, 2), "to_floor_rested": round(apart / rested, 3)}
            result[name]["gigabytes"] = round(peak_gigabytes(run), 2)
        except Exception as error:  # an implementation that cannot run is part of the result
            result[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    torch.cuda.empty_cache()
    scoring, one = milliseconds(
        [
            lambda: (*head_scores(case.hidden, Head(case.weight), case.token)[:3],),
            lambda: ((case.hidden @ case.weight.T)[0, 0],) * 3,
        ],
        rounds,
    )
    result["trimtab, scoring"] = {"ms": round(scoring, 2), "to_one_gemm": round(scoring / one, 3)}
    return result


def errors(rows: int = 8192, width: int = 2048, vocabulary: int = 32_000) -> dict[str, dict[str, float]]:
    """Return the relative distance to fp64 of trimtab's head and of full fp32 logits."""
    case = Case(rows, width, vocabulary)
    exact = case.in_fp64()
    return {
        name: {
            what: _distance(value, truth)
            for what, value, truth in zip(
                ("loss", "hidden", "weight"), IMPLEMENTATIONS[name](case)(), exact, strict=True
            )
        }
        for name in ("trimtab", "torch, full logits")
    }


def _distance(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def find_peers(folder: Path) -> None:
    """Make unpacked wheels importable; of verl only single modules, without what its `__init__` imports."""
    sys.path.insert(0, str(folder))
    for name in ("verl", "verl.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="a folder with the unpacked wheels of verl and liger-kernel")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--slow", type=int, default=5, help="rounds of the peers")
    args = parser.parse_args()
    if args.peers:
        find_peers(args.peers)
    what = f"head, loss and gradients, bf16, vocabulary {VOCABULARY}; medians, milliseconds, ratio to 3 GEMMs"
    result = about(what, torch.device("cuda"), "triton", "verl", "liger_kernel") | {"distance_to_fp64": errors()}
    for rows, width in SHAPES:
        result[f"{rows} x {width}"] = measure(rows, width, args.rounds, args.slow)
        save(result, args.out)
        print(json.dumps(result[f"{rows} x {width}"], indent=1))


if __name__ == "__main__":
    main()
