"""Short runs and single computations on two processes that share the weights of layers, in one start of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import SGD

from helpers.model.layer_kernel_cases import packed
from helpers.own_process import HANG, in_own_process
from helpers.sampling.requests import ArrivingRequests, requests_for
from helpers.train.short_runs import SETTINGS
from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.config import Config, load
from trimtab.trainer.model import Kernels, Policy, fuse_layers, load_policy
from trimtab.trainer.model.packed import packed_hidden_states, use_packed_attention
from trimtab.trainer.parallel import World, is_split, join_world, local_tensor, whole_tensor
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.train.loop import follow_run, train
from trimtab.trainer.train.reporting import Reporter
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder

# Three steps of two updates; uneven shares, and several micro-batches on each process, not as many on both.
SHORT = {
    **SETTINGS,
    "objective": '"grpo"',
    "rollout.prompts": "2",
    "rollout.samples": "3",
    "update.token_budget": "40",
    "update.warmup_steps": "0",
    "warm_start.steps": "2",
    "warm_start.batch_size": "3",
    "warm_start.cache": "false",
    "run.steps": "3",
    "run.eval_every": "0",
    "run.checkpoint_every": "1",
    "run.keep_checkpoints": "9",
    "record.enabled": "false",
}
update_module = import_module("trimtab.trainer.model.update")  # the package has a function of the same name
SHARDED = {"model.shard": "true"}
PROCESSES = 2


@dataclass(frozen=True)
class Job:
    """A run in a folder of its own: settings beside SHORT, whether it resumes, plain SGD instead of AdamW."""

    folder: str
    settings: Mapping[str, str]
    resume: bool = False
    sgd: bool = False

    def config(self) -> Config:
        return load("addition", [f"{key}={value}" for key, value in {**SHORT, **self.settings}.items()])

    def run(self, parent: Path, world: World) -> None:
        """Take part in the run as one of its processes."""
        adamw, path = update_module.AdamW, parent / self.folder
        if self.sgd:
            update_module.AdamW = plain_sgd
        try:
            if world.leads:
                train(Run(self.config(), RunFolder(path), Reporter(), self.resume, None, world))
            else:
                follow_run(self.config(), world)
        finally:
            update_module.AdamW = adamw


def plain_sgd(parameters: Any, lr: float, **options: Any) -> SGD:
    """SGD in the place of AdamW: its step shows a gradient that is off by a factor."""
    return SGD(parameters, lr=lr)


def run_on_two(jobs: Sequence[Job], extra: Callable[[Path, World], None], folder: Path) -> None:
    """Run jobs on two processes one after the other, then a function; raise if a process fails."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [in_own_process(_process, rank, store.port, jobs, extra, folder) for rank in range(PROCESSES)]
    for process in started:
        process.join(HANG)
        alive = process.is_alive()
        process.kill()
        assert not alive, "the processes wait for each other"
        assert process.exitcode == 0


def _process(rank: int, port: int, jobs: Sequence[Job], extra: Callable[[Path, World], None], folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    world = join_world("cpu")
    for job in jobs:
        job.run(folder, world)
    extra(folder, world)
    world.leave()


def sample_and_fuse(folder: Path, world: World) -> None:
    """Check that sharded layers sample and compute what whole ones do, where other code than a run's calls them."""
    for lora in (0, 2):
        whole, sharded = _policies(world, lora_rank=lora)
        _move_adapters(whole, sharded)
        for sampler_of in (_native, _paged):
            _compare_samples(sampler_of(whole), sampler_of(sharded), world)
        _check_bytes(sharded)
    _compare_fused(*_policies(world, precision="bf16"))


def _policies(world: World, **options: Any) -> list[Policy]:
    return [load_policy("demo", device="cpu", seed=3, shard=shard, **options) for shard in (None, world)]


def _move_adapters(*policies: Policy) -> None:
    """Change adapters, which add nothing as long as they are fresh."""
    for policy in policies:
        for name, weight in policy.model.named_parameters():
            if "lora_" in name:
                weight.data.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))


def _native(policy: Policy) -> Any:
    return NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast)


def _paged(policy: Policy) -> Any:
    return PagedSampler(policy.model, policy.eos_token_ids, torch.float32, max_pages=64)


def _compare_samples(whole: Any, sharded: Any, world: World) -> None:
    options = SamplingOptions(samples=2, max_new_tokens=4, seed=5)
    # The first process has nothing to sample.
    prompts = [PromptTokens((3, 4, 5), number) for number in range(world.rank * 2)]
    for _ in range(2):  # the paged sampler makes its copy of the weights, then writes it again
        expected, found = (some.sample(prompts, 1, options) for some in (whole, sharded))
        assert [[r.tokens.tolist() for r in group] for group in found] == [
            [r.tokens.tolist() for r in group] for group in expected
        ]
        answered = [_serve(some, prompts, options) for some in (whole, sharded)]
        assert answered[0] == answered[1]
        assert len(answered[0]) == 2 * len(prompts)


def _serve(sampler: Any, prompts: list[PromptTokens], options: SamplingOptions) -> list[list[int]]:
    """Return the tokens of the answers to requests that come one after the other."""
    asked = [request for group in requests_for(prompts, 1, options) for request in group]
    requests = ArrivingRequests(asked, max_delay=5, max_tokens=20)
    sampler.serve(requests, options)
    return [requests.answers[request].tokens.tolist() for request in asked]


def _check_bytes(policy: Policy) -> None:
    """Check that this process has its share of the layers' linear maps and nothing gathered, and the rest whole."""
    modules = (named for layer in policy.backbone.layers for named in layer.named_modules())
    split = {m.weight for name, m in modules if isinstance(m, nn.Linear) and "lora_" not in name}
    assert split == {p for p in policy.model.parameters() if is_split(p)}
    assert sum(local_tensor(p).nbytes for p in split) == 4 * sum(p.numel() for p in split) // PROCESSES


def _compare_fused(whole: Policy, sharded: Policy) -> None:
    for layer in whole.backbone.layers:
        layer.register_forward_hook(lambda *_: None)  # as FSDP does: a layer with hooks returns one tensor
    gradients = []
    for policy in (whole, sharded):
        use_packed_attention(policy.causal_lm)
        fuse_layers(policy.causal_lm, Kernels(add_norm, add_norm_back, no_rope, no_rope_back, product, product_back))
        assert all("forward" in vars(layer) for layer in policy.backbone.layers), "not fused"
        policy.model.train()
        with policy.autocast():
            hidden = packed_hidden_states(policy.backbone, packed(policy.device, 2, 2))
        hidden.float().square().sum().backward()
        # The same sequences on both processes: sharded gradients are the sum of two equal ones, whole ones are not.
        factor = {name: PROCESSES if is_split(p) else 1 for name, p in policy.model.named_parameters()}
        gradients.append({n: whole_tensor(p.grad) / factor[n] for n, p in policy.model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


# Stand-ins for the kernels of fused layers, easy to compute: not what they compute matters, but which weights they get.


def add_norm(x: Tensor, delta: Any, weight: Tensor, eps: float, residual: Tensor, out: Tensor, scale: Tensor) -> None:
    """Add, and multiply by the weight."""
    if delta is not None:
        residual.copy_(x + delta)
    out.copy_(residual * weight)


def add_norm_back(d_out: Tensor, d_residual: Any, residual: Tensor, weight: Tensor, scale: Any, **out: Any) -> None:
    """The gradients of `add_norm`."""
    out["d_x"].copy_(d_out * weight if d_residual is None else d_out * weight + d_residual)
    if out["d_delta"] is not None:
        out["d_delta"].copy_(out["d_x"])
    out["d_weight"].copy_((d_out * residual).sum(0 if residual.ndim == 2 else (0, 1)))


def no_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, **norms: Any) -> None:
    """Scale by the weights of norms, without rotating."""
    q_out.copy_(q * norms["norms"][0])
    k_out.copy_(k * norms["norms"][1])


def no_rope_back(
    d_q_out: Tensor, d_k_out: Tensor, cos: Tensor, sin: Tensor, d_q: Tensor, d_k: Tensor, **saved: Any
) -> None:
    """The gradients of `no_rope`."""
    d_q.copy_(d_q_out * saved["norms"][0])
    d_k.copy_(d_k_out * saved["norms"][1])
    saved["d_norms"][0] = (d_q_out * saved["q"]).sum((0, 1))
    saved["d_norms"][1] = (d_k_out * saved["k"]).sum((0, 1))


def product(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Multiply."""
    out.copy_(gate * up)


def product_back(d_out: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    """The gradients of `product`."""
    d_gate.copy_(d_out * up)
    d_up.copy_(d_out * gate)
