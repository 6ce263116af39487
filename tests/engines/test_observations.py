"""Replies of tools change nothing in TRL and verl: plan and loss are those of the policy's own tokens."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
from tensordict import TensorDict

import trimtab as tt
from helpers.engines.verl_batches import TEXT_IDS, TOKENIZER, as_minibatch, nested, with_plan
from helpers.objectives.batches import EVERY
from trimtab.engines.options import missing_fields
from trimtab.engines.trl import padded
from trimtab.engines.trl import recording as trl_recording
from trimtab.engines.verl import trainer as verl_trainer
from trimtab.engines.verl.planning import VERL_FIELDS, PlannedLoss, plan_step, sampled_tokens

COLUMNS = ("old_logp", "entropy", "sampler_logp", "ref_logp", "new_logp")
PLANNED = ("old_logp", "advantage", "weight", "scale", "clip_low", "clip_high", "reason", "penalty", "ref_logp")


@dataclass(frozen=True)
class Conversations:
    """Turns of token ids by conversation, replies of the tool between them, and the values of the policy's tokens."""

    turns: list[list[torch.Tensor]]
    replies: list[list[torch.Tensor]]
    values: dict[str, torch.Tensor]
    reward: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([sum(map(len, turns)) for turns in self.turns])

    @property
    def spans(self) -> list[list[tuple[torch.Tensor, int]]]:
        """Each conversation as spans of ids, 1 where the policy wrote them."""
        found = []
        for turns, replies in zip(self.turns, self.replies, strict=True):
            mixed = [[(ids, 1)] for ids in turns]
            for n, reply in enumerate(replies):  # a reply after each turn; the last may stand at the end
                mixed[n].append((reply, 0))
            found.append([span for pair in mixed for span in pair])
        return found


def conversations(seed: int) -> Conversations:
    """Eight conversations of up to three turns; one ends with a reply, one has no reply."""
    draw = torch.Generator().manual_seed(seed)

    def ids(size: int) -> torch.Tensor:
        return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (size,), generator=draw)

    def some(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draw))

    turns = [[ids(some(1, 9)) for _ in range(some(1, 3))] for _ in range(8)]
    turns[0], turns[1] = [ids(7), ids(5)], [ids(6)]
    lengths = sum(len(ids) for row in turns for ids in row)
    values = {name: -9 * torch.rand(lengths, generator=draw) ** 2 - 1e-4 for name in COLUMNS}
    values["entropy"] = 2 * torch.rand(lengths, generator=draw)
    reward = torch.randint(0, 2, (8,), generator=draw).float()
    return Conversations(turns, replies_for(turns, seed), values, reward)


def replies_for(turns: list[list[torch.Tensor]], seed: int) -> list[list[torch.Tensor]]:
    """A reply between any two turns, of any length, and one after the last turn of the first conversation."""
    draw = torch.Generator().manual_seed(1000 + seed)
    sizes = [[int(torch.randint(1, 30, (), generator=draw)) for _ in row[1:]] for row in turns]
    sizes[0].append(4)
    return [[torch.randint(0, TEXT_IDS.stop, (size,), generator=draw) for size in row] for row in sizes]


def by_hand(made: Conversations, objective: tt.Objective) -> tt.TokenBatch:
    """The batch of the policy's own tokens; each turn has segments of its own."""
    segments = []
    for turns in made.turns:
        first = 0
        for ids in turns:
            segments.append(tt.segment_ids(ids, TOKENIZER) + first)
            first = int(segments[-1][-1]) + 1
    group = torch.arange(8) // 4
    old = made.values["old_logp"]
    return tt.TokenBatch(
        **{name: made.values[name] for name in ("old_logp", "entropy", "sampler_logp", "ref_logp")},
        advantage=objective.advantages(made.reward, group).repeat_interleave(made.lengths),
        sequence=torch.arange(8).repeat_interleave(made.lengths),
        segment=torch.cat(segments),
        token=torch.cat([ids for turns in made.turns for ids in turns]),
        current_logp=old if "current_logp" in objective.needs else None,
        reward=made.reward,
        responses=8,
    )


def rows(made: Conversations, name: str, elsewhere: float) -> list[torch.Tensor]:
    """A column as rows, with another value where the policy wrote nothing."""
    parts = iter(made.values[name].split([len(ids) for turns in made.turns for ids in turns]))
    return [
        torch.cat([next(parts) if mine else torch.full((len(ids),), elsewhere) for ids, mine in spans])
        for spans in made.spans
    ]


def ids_and_masks(made: Conversations) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ids = [torch.cat([part for part, _ in spans]) for spans in made.spans]
    masks = [torch.cat([torch.full((len(part),), mine) for part, mine in spans]) for spans in made.spans]
    return ids, masks


def trl_batch(made: Conversations, objective: tt.Objective) -> dict[str, Any]:
    """The same as TRL has them: padded, `tool_mask` 0 on replies, and on padding 1."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, masks = ids_and_masks(made)
    batch = {
        "completion_ids": pad(ids, batch_first=True),
        "completion_mask": pad([torch.ones_like(mask) for mask in masks], batch_first=True),
        "tool_mask": pad(masks, batch_first=True, padding_value=1),
        # TRL has log-probabilities of replies too, and vLLM's are 0 there.
        "old_per_token_logps": pad(rows(made, "old_logp", -3.0), batch_first=True),
        "sampling_per_token_logps": pad(rows(made, "sampler_logp", 0.0), batch_first=True),
        "ref_per_token_logps": pad(rows(made, "ref_logp", -7.0), batch_first=True),
        padded.ENTROPY: pad(rows(made, "entropy", 99.0), batch_first=True),
        padded.REWARD: made.reward,
        padded.REWARDS: made.reward[:, None],
        "advantages": objective.advantages(made.reward, torch.arange(8) // 4),
    }
    return batch | {padded.SEGMENT: padded.segments(batch, TOKENIZER)}


def verl_batch(made: Conversations, objective: tt.Objective) -> TensorDict:
    """The same as verl has them: nested, `response_mask` 0 on replies and log-probabilities 0.0 there."""
    ids, masks = ids_and_masks(made)
    advantage = objective.advantages(made.reward, torch.arange(8) // 4)
    prompt = torch.tensor([5, 6])
    fields = {
        "prompts": [prompt] * 8,
        "responses": ids,
        "input_ids": [torch.cat([prompt, row]) for row in ids],
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": rows(made, "old_logp", -3.0),
        "rollout_log_probs": rows(made, "sampler_logp", 0.0),
        "ref_log_prob": rows(made, "ref_logp", -7.0),
        "entropy": rows(made, "entropy", 99.0),
        "advantages": [mask * value for mask, value in zip(masks, advantage, strict=True)],
    }
    return TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=8)


def assert_same(one: Any, other: Any, what: str) -> None:
    for name in PLANNED:
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), f"{what}: {name}"
        assert left is None or torch.equal(left, right), f"{what}: {name}"
    assert one.offsets == other.offsets, what


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_that_of_the_policys_own_tokens_whatever_the_replies_are(seed: int) -> None:
    made = conversations(seed)
    other = Conversations(made.turns, replies_for(made.turns, 77 + seed), made.values, made.reward)
    assert [len(row) for row in ids_and_masks(made)[0]] != [len(row) for row in ids_and_masks(other)[0]]
    for name in EVERY:
        native = tt.objective(name)
        if missing_fields(native, "TRL"):
            continue
        batch = by_hand(made, native)
        native.observe(batch)
        plan = native.plan(batch)
        for replied in (made, other):
            objective = tt.objective(name)
            tokens = padded.token_batch([trl_batch(replied, objective)], objective)
            objective.observe(tokens)
            assert_same(objective.plan(tokens), plan, f"TRL, {name}")
            assert objective.state_dict() == native.state_dict()
            if native.needs <= VERL_FIELDS.keys() and native.scope != "micro":
                objective = tt.objective(name)
                planned = plan_step(objective, verl_batch(replied, objective), 8, 1, TOKENIZER)
                assert_same(planned.plans[0], plan, f"verl, {name}")
                holes = torch.cat(ids_and_masks(replied)[1]) == 0
                for field, column in planned.fields.items():
                    assert column.dim() < 2 or not column.values()[holes].any(), f"verl, {name}: {field}"
                assert objective.state_dict() == native.state_dict()


@pytest.mark.parametrize("name", ["stapo(tau_p=0.2)", "stare(gate=none)", "sspo", "gspo", "dapo + kl(coef=0.1)"])
def test_the_loss_on_verls_workers_is_that_of_the_policys_own_tokens(name: str) -> None:
    made = conversations(5)
    other = Conversations(made.turns, replies_for(made.turns, 99), made.values, made.reward)
    objective = tt.objective(name)
    batch = by_hand(made, objective)
    new = made.values["new_logp"].clone().requires_grad_()
    out = objective.loss(new, objective.plan(batch))
    out.loss.backward()
    for replied in (made, other):
        data = with_plan(tt.objective(name), verl_batch(replied, objective), 8)
        # The engine has log-probabilities of every token of prompt and response, shifted by one.
        flat = nested([torch.cat([torch.zeros(1), row, torch.zeros(1)]) for row in rows(replied, "new_logp", -2.0)])
        leaf = flat.values().clone().requires_grad_()
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, flat.offsets())}
        loss, _ = PlannedLoss({"name": name})(output, as_minibatch(data, range(8)))
        assert torch.equal(loss.detach(), out.loss.detach())
        loss.backward()
        assert leaf.grad is not None and new.grad is not None
        # Of a conversation's entries the first stands for the prompt and the last for no token.
        inner = torch.cat([row[1:-1] for row in torch.nested.nested_tensor_from_jagged(leaf.grad, flat.offsets())])
        where = sampled_tokens(data["response_mask"])
        assert torch.equal(inner[where.index], new.grad)
        assert not inner[torch.cat(ids_and_masks(replied)[1]) == 0].any()


def test_a_conversation_that_ends_with_a_reply_is_not_finished() -> None:
    made = conversations(2)
    for turns in made.turns:
        turns[-1][-1] = TOKENIZER.eos_token_id
    objective = tt.objective("grpo")
    batch = trl_batch(made, objective)
    prompt = torch.ones(8, 2, dtype=torch.int64)
    batch |= {"prompt_ids": prompt, "prompt_mask": prompt, padded.RESPONSE_INDEX: torch.arange(8)}
    shape = trl_recording.RolloutShape(1, 4, 2, frozenset({TOKENIZER.eos_token_id}), ["right"], [1.0])
    data = verl_batch(made, objective)
    planned = plan_step(objective, data, 8, 1, TOKENIZER, ["token"])
    fields = dict(data.items()) | {"rm_scores": nested(rows(made, "old_logp", 0.0)), "uid": ["a"] * 8}
    for recorded in (
        trl_recording.samples(1, batch, shape),
        verl_trainer.samples(planned, fields, TOKENIZER.eos_token_id),
    ):
        responses = [sample.response for sample in recorded]
        assert [response.finished for response in responses] == [False] + [True] * 7
        for response, turns, replies in zip(responses, made.turns, made.replies, strict=True):
            assert response.sampled_tokens.tolist() == torch.cat(turns).tolist()
            observed = [response.tokens[start:end].tolist() for start, end in response.observed]
            assert observed == [reply.tolist() for reply in replies]
            assert [len(message) for message in response.messages if len(message)] == list(map(len, turns))
