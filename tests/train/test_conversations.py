"""Training on conversations: what tools wrote is context, and nothing that is trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.sampling.turns import RandomTurns
from helpers.train.scripted import scripted_trainer, small_config
from helpers.train.short_runs import trained
from trimtab.data import Problem, Response, Sample, user
from trimtab.grading import Verdict
from trimtab.insight.replay import replay
from trimtab.objectives import Moments, segment_ids
from trimtab.record import open_run
from trimtab.trainer.model import Policy, Transcript, load_policy, score, tool_tokens
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train import scoring
from trimtab.trainer.train.scoring import score_responses, transcripts_of


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def conversation(policy: Policy, messages: Sequence[str], replies: Sequence[list[int]], number: int) -> Sample:
    """A response with these messages and, between them, these replies."""
    tokens: list[int] = []
    observed = []
    for message, reply in zip(messages, [*replies, []], strict=True):
        tokens += policy.encode_solution(message)
        if reply:
            observed.append((len(tokens), len(tokens) + len(reply)))
            tokens += reply
    sampled = len(tokens) - sum(end - start for start, end in observed)
    rng = random.Random(number)
    response = Response(tokens, [-rng.random() for _ in range(sampled)], True, number % 4, tuple(observed))
    problem = Problem(user("1+1="), "2", "exact", "sums")
    prompt = policy.tokenizer.encode("1+1=")
    return Sample(problem, "", prompt, response, number // 4, verdict=Verdict("wrong"), reward=float(number % 2))


def conversations(policy: Policy, seed: int, most: int) -> list[Sample]:
    """Eight conversations whose messages are the same for every seed, and their replies not."""
    rng, other = random.Random(1), random.Random(seed)
    made = []
    for number in range(8):
        texts = ["".join(rng.choice("0123456789+=-") for _ in range(rng.randint(1, 9))) for _ in range(1 + number % 4)]
        replies = [[other.randrange(3, 17) for _ in range(other.randint(1, most))] for _ in texts[1:]]
        made.append(conversation(policy, texts, replies, number))
    return made


@pytest.mark.parametrize("name", ["grpo", "stapo", "stare", "sspo + s2t"])
def test_other_replies_leave_the_plan_as_it_is(policy: Policy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def same_scores(policy: Policy, transcripts: Sequence[Transcript], *options: Any) -> Moments:
        noise = torch.Generator().manual_seed(0)
        count = sum(transcript.num_sampled for transcript in transcripts)
        logp, entropy, sum_p2, below = torch.rand(4, count, generator=noise)
        return Moments(-logp, entropy, sum_p2, -below)

    monkeypatch.setattr(scoring, "score", same_scores)
    trainer = scripted_trainer(policy, None, small_config(objective={"name": name}))  # type: ignore[arg-type]
    made = [conversations(policy, *other) for other in ((1, 5), (2, 5), (3, 40))]
    batches = [score_responses(trainer, responses, transcripts_of(responses)) for responses in made]
    plans = [trainer.objective.plan(batch) for batch in batches]
    for batch, plan in zip(batches[1:], plans[1:], strict=True):
        assert batch.tokens == batches[0].tokens
        for each in ("token", "sampler_logp", "sequence", "advantage", "segment"):
            before, after = getattr(batches[0], each), getattr(batch, each)
            assert (before is None and after is None) or torch.equal(before, after)
        for each in ("weight", "scale", "advantage", "reason", "clip_low", "clip_high"):
            assert torch.equal(getattr(plans[0], each), getattr(plan, each))


def test_a_batch_holds_the_sampled_tokens_with_the_log_probs_of_the_whole_conversation(policy: Policy) -> None:
    responses = conversations(policy, 1, 9)
    trainer = scripted_trainer(policy, None, small_config(objective={"name": "sspo"}))  # type: ignore[arg-type]
    transcripts = transcripts_of(responses)
    batch = score_responses(trainer, responses, transcripts)
    assert batch.token is not None and batch.sampler_logp is not None and batch.segment is not None
    assert batch.token.tolist() == [token for each in responses for token in each.response.sampled_tokens]
    assert batch.sampler_logp.tolist() == pytest.approx([logp for each in responses for logp in each.response.logp])
    for number, each in enumerate(responses):
        ids = torch.from_numpy(transcripts[number].ids)
        with torch.no_grad():
            logp = policy.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logp = logp.gather(1, ids[1:, None]).squeeze(1)[len(each.prompt) - 1 :]
        mine = batch.sequence == number
        expected = logp[torch.from_numpy(transcripts[number].sampled)]
        torch.testing.assert_close(batch.old_logp[mine], expected, rtol=0, atol=1e-5)
        # Every message has segments of its own, numbered on.
        segments = iter(batch.segment[mine].split([len(message) for message in each.response.messages]))
        first = 0
        for message in each.response.messages:
            own = segment_ids(message.tolist(), policy.tokenizer)
            assert next(segments).tolist() == (own + first).tolist()
            first += int(own.max()) + 1


def test_padded_and_single_scores_of_conversations_agree(policy: Policy) -> None:
    transcripts = transcripts_of(conversations(policy, 4, 30))
    together = score(policy, transcripts, 1.0, 10_000, 64).logp
    alone = torch.cat([score(policy, [transcript], 1.0, 10_000, 64).logp for transcript in transcripts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_tool_tokens_are_counted_at_the_token_after_them() -> None:
    transcripts = [
        Transcript([1], [7, 8, 9, 4, 5], ((1, 3),)),
        Transcript([1], [7, 8], ()),
        Transcript([1], [7, 8, 9, 4, 5, 6], ((0, 1), (2, 4), (5, 6))),
    ]
    assert tool_tokens(transcripts).tolist() == [0, 2, 0, 0, 0, 1, 2]
    assert [t.sampled_tokens.tolist() for t in transcripts] == [[7, 4, 5], [7, 8], [8, 5]]


def test_a_run_on_conversations_is_recorded_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = NativeSampler.sample
    sampled: list[Response] = []

    def converse(self: NativeSampler, prompts: Any, step: int, options: Any, turns: Any = None) -> Any:
        turns = RandomTurns(seed=step, end=0.4, lengths=(1, 4), max_turns=3, vocabulary=(3, 17))
        groups = sample(self, prompts, step, replace(options, max_new_tokens=12), turns)
        sampled.extend(response for group in groups for response in group)
        return groups

    monkeypatch.setattr(NativeSampler, "sample", converse)
    trained(tmp_path / "run", {"run.steps": "2", "run.eval_every": "0", "objective.name": "sspo"})
    by_tokens = {tuple(response.sampled_tokens.tolist()): response for response in sampled}
    assert any(response.observed for response in sampled)
    marked = 0
    for step in open_run(tmp_path / "run"):
        tools, tokens, segments = (step.tokens[name] for name in ("tool_tokens", "token", "segment"))
        for n, (start, end) in enumerate(pairwise(step.offsets)):
            response = by_tokens[tuple(tokens[start:end].tolist())]
            text = step.records.vocabulary.decode
            messages = [0, *np.cumsum([len(message) for message in response.messages]).tolist()]
            assert [(each.after, each.tokens, each.text) for each in step.observations(n)] == [
                (after, last - first, text(response.tokens[first:last].tolist()))
                for after, (first, last) in zip(messages[1:], response.observed, strict=False)
            ]
            lengths = [last - first for first, last in response.observed]
            assert sorted(tools[start:end][tools[start:end] > 0].tolist()) == sorted(lengths)
        after = np.flatnonzero(tools)
        marked += len(after)
        assert (segments[after] != segments[after - 1]).all(), "no segment spans what a tool wrote"
    assert marked
    assert replay(tmp_path / "run").exact
