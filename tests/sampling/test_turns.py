"""Conversations: what is sampled between replies depends neither on the sampler nor on when replies come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.sampling.paged_models import EOS, VOCABULARY, assert_same, prompts, tiny
from helpers.sampling.turns import RandomTurns
from trimtab.data import Reply, Response, SamplingOptions
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling.paged.sampler import Prefill
from trimtab.trainer.sampling.paged.scheduler import Scheduler, SequenceGroup

BATCH = prompts(1, 20, 64, 70)
OPTIONS = SamplingOptions(samples=4, max_new_tokens=50, seed=3)
MESSAGE_ENDS = frozenset({*EOS, *range(40, 52)})  # so many that messages are short, and conversations have many turns


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


@pytest.fixture(scope="module")
def reference(llama: Any) -> tuple[RandomTurns, list[list[Response]]]:
    """The native sampler's conversations, and the other side of them."""
    turns = RandomTurns()
    return turns, native(llama, turns)


def native(model: Any, turns: Any, **how: Any) -> list[list[Response]]:
    return NativeSampler(model, MESSAGE_ENDS, 0, nullcontext).sample(BATCH, 1, replace(OPTIONS, **how), turns)


def paged(model: Any, turns: Any, options: SamplingOptions = OPTIONS, **how: Any) -> list[list[Response]]:
    return PagedSampler(model, MESSAGE_ENDS, torch.float32, **how).sample(BATCH, 1, options, turns)


def test_the_native_sampler_samples_conversations(reference: tuple[RandomTurns, list[list[Response]]]) -> None:
    turns, groups = reference
    turns.check(groups, MESSAGE_ENDS, OPTIONS.max_new_tokens)
    responses = [response for group in groups for response in group]
    assert max(len(response.observed) for response in responses) > 3
    assert {response.finished for response in responses} == {True, False}


def test_log_probs_are_those_of_the_training_forward(
    llama: Any, reference: tuple[RandomTurns, list[list[Response]]]
) -> None:
    policy = Policy(llama, SimpleNamespace(pad_token_id=0, eos_token_id=2), torch.device("cpu"), "fp32")
    pairs = [(prompt, response) for prompt, group in zip(BATCH, reference[1], strict=True) for response in group]
    transcripts = [Transcript(prompt.ids, response.tokens, response.observed) for prompt, response in pairs]
    measured = score(policy, transcripts, 1.0, token_budget=1000, head_chunk=64).logp
    sampled = torch.tensor([logp for _, response in pairs for logp in response.logp])
    torch.testing.assert_close(measured, sampled, rtol=0, atol=5e-5)
    tokens = [token for transcript in transcripts for token in transcript.sampled_tokens.tolist()]
    assert tokens == [token for _, response in pairs for token in response.sampled_tokens.tolist()]


@pytest.mark.parametrize(
    ("order", "delay", "batch_size"), [(1, 0, 16), (2, 20, 16), (3, 6, 3)], ids=["at once", "late", "few slots"]
)
@pytest.mark.parametrize("sampler", [native, paged])
def test_neither_sampler_nor_order_nor_slots_matter(
    llama: Any,
    reference: tuple[RandomTurns, list[list[Response]]],
    sampler: Any,
    order: int,
    delay: int,
    batch_size: int,
) -> None:
    turns = RandomTurns(order=order, max_delay=delay)
    how = {"batch_size": batch_size} if sampler is native else {"options": replace(OPTIONS, batch_size=batch_size)}
    groups = sampler(llama, turns, **how)
    assert_same(groups, reference[1])
    assert [r.observed for group in groups for r in group] == [r.observed for group in reference[1] for r in group]
    turns.check(groups, MESSAGE_ENDS, OPTIONS.max_new_tokens)


def test_the_native_samplers_conversations_are_equal_to_the_bit_however_late_replies_come(
    llama: Any, reference: tuple[RandomTurns, list[list[Response]]]
) -> None:
    assert native(llama, RandomTurns(order=8, max_delay=30)) == reference[1]


def test_kept_pages_leave_only_the_reply_to_prefill(
    llama: Any, reference: tuple[RandomTurns, list[list[Response]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilled: list[int] = []
    run = Prefill.run

    def counting(
        self: Prefill, prefixes: Sequence[Sequence[int]], pages: Any, cached: Sequence[int] | None = None
    ) -> None:
        prefilled.append(sum(map(len, prefixes)) - sum(cached or ()))
        run(self, prefixes, pages, cached)

    monkeypatch.setattr(Prefill, "run", counting)
    groups = paged(llama, RandomTurns(order=7))
    assert_same(groups, reference[1])
    replies = [end - start for group in groups for r in group for start, end in r.observed]
    prompt_tokens = sum(len(prompt.ids) - 1 for prompt in BATCH)
    # A reply is prefilled but for its last token, with the end token before it: as many tokens as it has.
    assert sum(prefilled) == prompt_tokens + sum(replies)


def test_with_few_pages_conversations_are_recomputed_and_stay_the_same(
    llama: Any,
    reference: tuple[RandomTurns, list[list[Response]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed, free_kept = [], Scheduler._free_kept

    def noting(self: Scheduler, spared: SequenceGroup | None = None) -> bool:
        freed.append(free_kept(self, spared))
        return freed[-1]

    monkeypatch.setattr(Scheduler, "_free_kept", noting)
    turns = RandomTurns(order=4)
    # As few pages as the longest conversation needs twice.
    assert_same(paged(llama, turns, max_pages=1, steps_per_sync=3), reference[1])
    assert any(freed), "all fitted: the test proves nothing"
    turns.check(reference[1], MESSAGE_ENDS, OPTIONS.max_new_tokens)


def test_another_reply_changes_only_what_comes_after_it(
    llama: Any, reference: tuple[RandomTurns, list[list[Response]]]
) -> None:
    """The random stream goes by sampled tokens: a first message is the same whatever its reply will be."""
    others = native(llama, RandomTurns(seed=9))
    pairs = [
        (a, b) for ours, theirs in zip(reference[1], others, strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    assert all(a.messages[0].tolist() == b.messages[0].tolist() for a, b in pairs)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs)


def test_without_a_reply_conversations_are_single_responses(llama: Any) -> None:
    alone = NativeSampler(llama, MESSAGE_ENDS, 0, nullcontext).sample(BATCH, 1, OPTIONS)
    for sampler in (native, paged):
        assert_same(sampler(llama, RandomTurns(end=1.0)), alone)
    assert NativeSampler(llama, MESSAGE_ENDS, 0, nullcontext).sample([], 1, OPTIONS, RandomTurns()) == []
    assert PagedSampler(llama, MESSAGE_ENDS, torch.float32).sample([], 1, OPTIONS, RandomTurns()) == []


class Wrong(RandomTurns):
    """Changes every reply."""

    changes: Mapping[str, Any] = MappingProxyType({})
    max_observed_tokens = 10

    def replies(self, block: bool) -> list[Reply]:
        return [replace(reply, **self.changes) for reply in super().replies(block)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "has no tokens: None is what ends a conversation"),
        ({"tokens": [5, VOCABULARY]}, f"holds token {VOCABULARY}, but the model's vocabulary is 0 to {VOCABULARY - 1}"),
        ({"tokens": [5, -1]}, "holds token -1"),
        ({"tokens": [5] * 11}, "have 11 tokens, and the KV cache has room for max_observed_tokens=10"),
        ({"prompt": 99}, "of prompt 99, which waits for none"),
    ],
)
@pytest.mark.parametrize("sampler", [native, paged])
def test_a_wrong_reply_is_named(llama: Any, sampler: Any, changes: dict[str, Any], message: str) -> None:
    turns = Wrong(end=0.0)
    turns.changes = changes
    with pytest.raises(ValueError, match=message):
        sampler(llama, turns)
