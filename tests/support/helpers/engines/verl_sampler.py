"""A rollout server for verl on a CPU: it samples with transformers, and takes new weights between steps."""

from __future__ import annotations

import asyncio
from typing import Any

import torch


class Sampler:
    """A rollout server: requests that come within a moment are sampled as one batch."""

    def __init__(self, path: str, tokens: int) -> None:
        from transformers import AutoModelForCausalLM
        from verl.workers.rollout.replica import TokenOutput

        self.output = TokenOutput
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.tokens = tokens
        self.waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[Any]]] = []
        self.version: int | None = None

    async def ping(self) -> bool:
        return True

    async def update(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.version = version

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), answer))
        if len(self.waiting) == 1:
            self.task = asyncio.create_task(self._sample())
        tokens, logp = await answer
        given = logp if sampling_params.get("logprobs") else None
        return self.output(
            token_ids=tokens,
            log_probs=given,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    async def _sample(self) -> None:
        await asyncio.sleep(0.05)
        batch, self.waiting = self.waiting, []
        width = max(len(prompt) for prompt, _, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _, _ in batch])
        ends = [self.model.config.eos_token_id, *(batch[0][1].get("stop_token_ids") or [])]
        heat = float(batch[0][1].get("temperature", 1.0))
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _, _ in batch]),
                max_new_tokens=self.tokens,
                do_sample=heat > 0,
                temperature=heat or None,
                top_k=0,
                top_p=1.0,
                return_dict_in_generate=True,
                output_logits=True,
                eos_token_id=ends,
            )
        new = out.sequences[:, width:]
        scores = torch.stack([(logits / (heat or 1.0)).log_softmax(-1) for logits in out.logits], 1)
        logp = scores.gather(-1, new[..., None]).squeeze(-1)
        for (_, params, answer), tokens, chances in zip(batch, new.tolist(), logp.tolist(), strict=True):
            most = min(len(tokens), params.get("max_tokens", len(tokens)))
            size = next((n for n, token in enumerate(tokens[:most], 1) if token in ends), most)
            answer.set_result((tokens[:size], chances[:size]))

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing to put to sleep."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing

    async def set_global_steps(self, version: int) -> None:
        self.version = version
