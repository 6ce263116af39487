"""verl's nested tensors and ours: holes of tool output, mini-batches as verl cuts them, plans as columns, records."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from helpers.engines.verl_batches import TOKENIZER, core_batch, nested, random_batch
from helpers.engines.verl_runs import CHARACTERS, SPECIAL
from trimtab.engines.common import segments_by_turn, tool_tokens
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl.planning import fields_read, minibatch_rows, plan_step, sampled_tokens
from trimtab.engines.verl.trainer import record_step, start_recording
from trimtab.objectives import Reason
from trimtab.record import open_run
from trimtab.trainer.config import build_objective


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6)


@given(MASKS, st.randoms())
@settings(max_examples=60)
def test_unpacking_reverses_packing(masks: list[list[bool]], shuffle: object) -> None:
    order = list(range(len(masks)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    mask = nested([torch.tensor(row, dtype=torch.int64) for row in masks])
    values = nested([torch.arange(1.0, len(row) + 1) + 100 * n for n, row in enumerate(masks)])
    where = sampled_tokens(mask, order)
    packed = where.pack(values)
    wanted = [100.0 * n + t + 1 for n in order for t, kept in enumerate(masks[n]) if kept]
    assert packed.tolist() == wanted
    assert where.sequence.tolist() == [place for place, n in enumerate(order) for kept in masks[n] if kept]
    back = where.unpack(packed)
    assert torch.equal(back.offsets(), values.offsets())
    assert torch.equal(back.values(), values.values() * mask.values())


def test_tool_output_is_not_planned() -> None:
    objective = build_objective({"name": "stapo", "tau_p": 0.9, "quantile": 1.0})
    data = random_batch(11)
    data["advantages"] = torch.nested.nested_tensor_from_jagged(
        torch.ones_like(data["advantages"].values()), data["advantages"].offsets()
    )  # what a careless batch would put on tool tokens as well
    data["entropy"].values()[data["response_mask"].values() == 0] = float("nan")
    planned = plan_step(objective, data, 8, 1, TOKENIZER)
    holes = data["response_mask"].values() == 0
    assert holes.any()
    assert planned.tokens.tokens == int((~holes).sum())
    for name in ("trimtab_scale", "trimtab_weight"):
        assert not planned.fields[name].values()[holes].any()
    assert planned.plans[0].reason.bitwise_and(int(Reason.SILENCED)).any()
    wanted = objective.plan(core_batch(objective, data, range(8)))
    assert torch.equal(planned.fields["trimtab_weight"].values()[~holes], wanted.weight)


def test_a_subsentence_ends_where_tool_output_begins() -> None:
    rows = ["1+1=2, 3", "9 9", "4. 5"]
    masks = [[1] * len(row) for row in rows]
    masks[1][1] = 0
    masks[2][3] = 0
    mask = nested([torch.tensor(row) for row in masks])
    where = sampled_tokens(mask)
    tokens = where.pack(nested([torch.tensor(ids(row)) for row in rows]))
    found = segments_by_turn(tokens, where.index, where.sequence, TOKENIZER)
    assert found.tolist() == [0] * 7 + [1] + [0, 1] + [0, 0, 0]
    assert tool_tokens(where.index, where.sequence).tolist() == [0] * 8 + [0, 1] + [0, 0, 0]


def test_no_token_at_all_has_no_subsentence() -> None:
    where = sampled_tokens(nested([torch.zeros(3, dtype=torch.int64)]))
    assert segments_by_turn(torch.zeros(0, dtype=torch.int64), where.index, where.sequence, TOKENIZER).tolist() == []


@pytest.mark.parametrize(("rows", "minibatch", "ranks"), [(16, 16, 1), (16, 8, 2), (32, 8, 4), (24, 8, 1)])
def test_mini_batches_are_those_of_verl(rows: int, minibatch: int, ranks: int) -> None:
    """Against verl's own dispatch and iterator: rows to ranks in equal runs, then an equal share for each update."""
    data = TensorDict({"row": torch.arange(rows)}, batch_size=rows)
    theirs: list[list[int]] = [[] for _ in range(rows // minibatch)]
    for mine in tu.chunk_tensordict(data, ranks):
        cut = tu.make_iterator(mine, minibatch // ranks, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
        for update, part in enumerate(cut):
            theirs[update] += part["row"].tolist()
    assert minibatch_rows(rows, minibatch, ranks) == theirs


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be split into mini-batches of 6"):
        minibatch_rows(16, 6, 1)
    with pytest.raises(ValueError, match="on 3 ranks"):
        minibatch_rows(16, 8, 3)


def test_each_mini_batch_is_planned_by_itself() -> None:
    objective = build_objective({"name": "dapo"})
    data = random_batch(5, responses=8)
    planned = plan_step(objective, data, 4, 2, TOKENIZER)
    assert planned.rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
    sizes = [int(mask.sum()) for mask in data["response_mask"].unbind()]
    for update, rows in enumerate(planned.rows):
        tokens = sum(sizes[row] for row in rows)
        for row in rows:
            scale = planned.fields["trimtab_scale"].unbind()[row]
            kept = data["response_mask"].unbind()[row].bool()
            assert torch.equal(scale[kept], torch.full((sizes[row],), 1 / tokens))
            assert int(planned.fields["trimtab_update"][row]) == update
            assert int(planned.fields["trimtab_tokens"][row]) == tokens


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("grpo", "scale"),
        ("stapo", "scale,weight"),
        ("sspo", "scale,clip_low,clip_high,segment"),
        ("entropy_advantage", "scale,advantage"),
        ("kl_cov", "scale,penalty"),
    ],
)
def test_only_columns_that_differ_from_defaults_are_sent(name: str, columns: str) -> None:
    table = {"name": name, **({"tau_p": 0.9} if name == "stapo" else {"share": 0.2} if name == "kl_cov" else {})}
    planned = plan_step(build_objective(table), random_batch(6), 8, 1, TOKENIZER)
    assert planned.sent == columns


def test_only_the_fields_that_are_read_are_fetched() -> None:
    assert fields_read(build_objective({"name": "grpo"}).needs) == ["advantages", "old_log_probs", "response_mask"]
    assert {"responses", "entropy"} <= set(fields_read(build_objective({"name": "sspo"}).needs))


def test_the_gate_observes_a_batch_once() -> None:
    objective = build_objective({"name": "stare", "adaptive": True, "target": 9.0})
    planned = plan_step(objective, random_batch(7), 4, 1, TOKENIZER)
    assert len(planned.plans) == 2
    assert objective.state_dict()["stare"]["boost"] == pytest.approx(1.11)
    assert planned.metrics["trimtab/tokens/boosted_share"] > 0


def test_trim_observes_a_batch_once_and_weighs_each_mini_batch_by_its_own_tokens() -> None:
    objective = build_objective({"name": "dapo + trim", "floor": 9.0, "gain": 2.0, "max_weight": 100.0})
    planned = plan_step(objective, random_batch(7), 4, 1, TOKENIZER)
    assert objective.state_dict()["trim"]["rollouts"] == 1
    assert objective.state_dict()["trim"]["entropy"] == pytest.approx(float(planned.tokens.entropy.mean()))
    weights = [float(plan.metrics["trim/weight"]) for plan in planned.plans]
    assert min(weights) > 1 and weights[0] != weights[1]
    assert planned.metrics["trimtab/trim/weight"] == pytest.approx(sum(weights) / 2)
    assert planned.sent == "scale,weight"


def test_a_metric_without_a_value_in_one_update_is_the_mean_of_the_others() -> None:
    objective = build_objective({"name": "stapo", "tau_p": 0.9})
    data = random_batch(8)
    advantages = torch.ones_like(data["advantages"].values())
    advantages[: int(data["advantages"].offsets()[4])] = -1.0
    data["advantages"] = torch.nested.nested_tensor_from_jagged(advantages, data["advantages"].offsets())
    planned = plan_step(objective, data, 4, 1, TOKENIZER)
    first, second = (plan.metrics for plan in planned.plans)
    assert "s2t/entropy_threshold" not in first
    assert planned.metrics["trimtab/s2t/entropy_threshold"] == float(second["s2t/entropy_threshold"])


def test_a_step_is_recorded_with_its_plans(tmp_path: object) -> None:
    objective = build_objective({"name": "stapo", "tau_p": 0.5})
    data = random_batch(9)
    planned = plan_step(objective, data, 4, 2, TOKENIZER, ["token", "entropy", "sampler_logp"])
    data["uid"] = np.array([f"prompt {n // 4}" for n in range(8)], dtype=object)
    data["rm_scores"] = nested(
        [torch.full((len(row),), (0.1, 1.0)[n % 2] / len(row)) for n, row in enumerate(data["responses"].unbind())]
    )
    data["reward_model"] = np.array([{"ground_truth": n} for n in range(8)], dtype=object)
    recorder = start_recording(
        EngineOptions(objective={"name": "stapo"}, record=str(tmp_path)), objective, TOKENIZER, 0
    )
    assert recorder is not None
    record_step(recorder, 1, planned, data, objective, TOKENIZER.eos_token_id)
    recorder.close()
    step = open_run(str(tmp_path)).step(1)
    order = [row for rows in planned.rows for row in rows]
    assert list(step.responses["answer"]) == [str(row) for row in order]
    assert list(step.responses["group"]) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(step.responses["verdict"]) == [("wrong", "correct")[row % 2] for row in order]
    assert step.tokens["token"].tolist() == planned.sampled.pack(data["responses"]).tolist()
    assert np.array_equal(step.tokens["weight"], torch.cat([plan.weight for plan in planned.plans]).numpy())
    assert step.info.complete and [update.responses for update in step.info.updates] == [4, 4]
    # Where tool output was left out, the next sampled token says how much.
    whole = [data["response_mask"].unbind()[row].tolist() for row in order]
    inner = [sum(not mask for mask in row[row.index(1) : len(row) - row[::-1].index(1)]) for row in whole if any(row)]
    marked, offsets = step.tokens["tool_tokens"], step.offsets
    found = [int(marked[offsets[n] : offsets[n + 1]].sum()) for n, row in enumerate(whole) if any(row)]
    assert found == inner and any(inner)
    assert [sum(each.tokens for each in step.observations(n)) for n in range(8)] == [row.count(0) for row in whole]


def test_nothing_is_recorded_without_the_option() -> None:
    assert (
        start_recording(EngineOptions(objective={"name": "stapo"}), build_objective({"name": "stapo"}), TOKENIZER, 0)
        is None
    )
