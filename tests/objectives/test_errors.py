"""Wrong input gets one error that names the thing and says what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, fields


def build(**changes: Any) -> tt.TokenBatch:
    return tt.TokenBatch.from_padded(**{**fields(0), **changes})


@pytest.mark.parametrize("field", ["old_logp", "entropy", "advantage", "sampler_logp", "ref_logp", "sum_p2", "reward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_with_its_place(field: str, value: float) -> None:
    padded = fields(0)
    padded["mask"][2] = True
    spoilt = padded[field].clone()
    spoilt[(2,) if spoilt.ndim == 1 else (2, 4)] = value
    place = "response 2" if field in ("reward", "advantage") else "response 2, token 4"
    with pytest.raises(ValueError, match=rf"`{field}` is {value} at {place}"):
        tt.TokenBatch.from_padded(**{**padded, field: spoilt})


def test_a_value_under_padding_may_be_anything() -> None:
    padded = fields(0)
    padded["entropy"][~padded["mask"]] = float("nan")
    tt.TokenBatch.from_padded(**padded)


@pytest.mark.parametrize("field", ["old_logp", "entropy", "token", "segment", "current_logp"])
def test_a_padded_field_of_another_shape_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` has shape \(6, 3\), but the mask has \(6, 11\)"):
        build(**{field: torch.zeros(6, 3)})


def test_an_advantage_of_another_length_is_named() -> None:
    with pytest.raises(ValueError, match=r"`advantage` has shape \(5,\)"):
        build(advantage=torch.zeros(5))


@pytest.mark.parametrize("field", ["group", "reward"])
def test_a_response_field_of_another_length_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` has shape \(5,\), but there are 6 responses"):
        build(**{field: torch.zeros(5)})


def test_token_fields_must_be_equally_long() -> None:
    with pytest.raises(ValueError, match=r"`entropy` has shape \(2,\), but `old_logp` has 3 tokens"):
        tt.TokenBatch(
            old_logp=torch.zeros(3), advantage=torch.zeros(3), sequence=torch.zeros(3), entropy=torch.zeros(2)
        )


@pytest.mark.parametrize("sequence", [[0, 1, 0], [-1, 0, 0], [0, 1, 5]])
def test_sequence_numbers_must_be_in_order_and_in_range(sequence: list[int]) -> None:
    with pytest.raises(ValueError, match="`sequence` must be non-decreasing response numbers from 0 to 1"):
        tt.TokenBatch(old_logp=torch.zeros(3), advantage=torch.zeros(3), sequence=torch.tensor(sequence), responses=2)


@pytest.mark.parametrize(
    ("mask", "words"),
    [(torch.ones(3), r"must be \(responses, positions\)"), (torch.full((6, 11), 0.5), "must hold 0 and 1 alone")],
)
def test_a_mask_that_is_none_is_refused(mask: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(mask=mask)


@pytest.mark.parametrize(
    ("name", "field", "advice"),
    [
        ("stapo", "entropy", "pass that gives old_logp"),
        ("sspo", "segment", "segment_ids"),
        ("grpo + kl", "ref_logp", "reference model"),
        ("grpo + tis", "sampler_logp", "sampler drew"),
    ],
)
def test_a_missing_field_is_named_with_the_method(name: str, field: str, advice: str) -> None:
    objective = tt.objective(name)
    assert field in objective.needs
    with pytest.raises(ValueError, match=rf"{name.split(maxsplit=1)[0]}.* reads `{field}`.*{advice}"):
        objective.plan(build(**{field: None}))


def test_stares_gate_needs_the_entropy_of_the_rollout() -> None:
    with pytest.raises(ValueError, match="stare reads `entropy`"):
        tt.objective("stare").observe(build(entropy=None))


def test_statistics_must_fit_the_batch() -> None:
    current = build(current_logp=fields(0)["old_logp"])
    with pytest.raises(ValueError, match="reads `current_logp`"):
        tt.objective("stapo", token_stats="current").plan(build())
    with pytest.raises(ValueError, match="token_stats='old', but the TokenBatch carries `current_logp`"):
        tt.objective("stapo", token_stats="old").plan(current)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("stappo", {}, "unknown method 'stappo': did you mean stapo"),
        ("GRPO2", {}, "did you mean grpo"),
        ("xyz", {}, "there are cispo, clip_b, clip_cov"),
        ("s2t", {}, "attaches to a method.*dapo [+] s2t"),
        ("grpo + dapo", {}, "'dapo' is a method and cannot attach"),
        ("grpo + stere", {}, "unknown attachment 'stere': did you mean steer or stare"),
        ("grpo + ", {}, "cannot read the objective"),
        ("", {}, "cannot read the objective"),
        ("grpo + s2t(tau_p)", {}, "write option=value"),
        ("grpo + s2t(tau=1)", {}, "unknown option of s2t 'tau': did you mean tau_p"),
        ("grpo", {"clip_hi": 0.2}, "unknown option of grpo 'clip_hi': did you mean clip_high"),
        ("stapo", {"tau_p": -0.1}, "tau_p=-0.1 must be between 0 and 1"),
        ("stapo", {"tau_p": "small"}, "tau_p='small' must be a number"),
        ("stapo", {"tau_p": float("nan")}, "tau_p=nan must be between"),
        ("stapo", {"tau_p": True}, "tau_p=True must be a number"),
        ("stapo", {"seed": 0.5}, "seed=0.5 must be a whole number"),
        ("dapo", {"dual_clip": 0.5}, "dual_clip=0.5 must be at least 1"),
        ("dapo", {"clip_low": -1}, "clip_low=-1 must be at least 0"),
        ("sspo", {"widen_low": 2.0}, "sspo: option widen_low=2 must be at most widen_high, which is 1.5"),
        ("clip_cov", {"cov_low": 4, "cov_high": 3}, "cov_low=4 must be at most cov_high, which is 3"),
        ("dapo + icepop(high=0.2)", {}, "icepop: option low=0.5 must be at most high, which is 0.2"),
        ("stare", {"variant": "O9"}, "variant='O9' must be one of O1, O2"),
        ("stare", {"boost": "most"}, "boost='most' must be one of critical or a number"),
        ("stare", {"boost": 0.5}, "boost=0.5 must be between 1 and 10"),
        ("stare", {"boost": "critical", "adaptive": True}, "measured for every update: set adaptive=false"),
        ("stare", {"boost": "critical", "variant": "O2"}, "variant=O2 boosts no tokens.*try O1"),
        ("dapo + trim(phi=rough)", {}, "phi='rough' must be one of exact, estimated"),
        ("dapo + trim(floor=-1)", {}, "trim: option floor=-1 must be at least 0"),
        ("dapo + trim(max_weight=0.5)", {}, "max_weight=0.5 must be between 1 and 100"),
        ("dapo + trim(fall_steps=0)", {}, "fall_steps=0 must be at least 1"),
        ("dapo + trim + trim", {}, "'trim' is in 'dapo' already"),
        ("trim", {}, "attaches to a method.*dapo [+] trim"),
        ("cispo", {"upper_only": 1}, "upper_only=1 must be true or false"),
        ("grpo", {"aggregation": "mean"}, "aggregation='mean' must be one of token-mean"),
        ("grpo", {"scope": "global"}, "scope='global' must be one of minibatch, micro"),
        ("stapo + s2t", {}, "'s2t' is in 'stapo' already"),
        ("grpo + s2t + s2t", {}, "'s2t' is in 'grpo' already"),
        ("grpo", {"s2t": False}, "leave it out"),
        ("grpo + icepop + mis", {"low": 0.1}, "several attachments of .* have the option .low."),
    ],
)
def test_a_wrong_name_or_option_says_what_would_be_right(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tt.objective(name, **options)


def test_an_endless_name_makes_no_endless_error() -> None:
    with pytest.raises(ValueError, match="cannot read the objective") as caught:
        tt.objective("grpo + " * 20_000)
    assert len(str(caught.value)) < 400


def test_a_mask_may_be_a_list() -> None:
    tokens = tt.TokenBatch.from_padded([[1, 0]], old_logp=-torch.ones(1, 2), advantage=torch.ones(1))
    assert tokens.tokens == 1


def test_new_log_probabilities_of_another_length_are_named() -> None:
    tokens, objective = batch(0), tt.objective("grpo")
    plan = objective.plan(tokens)
    with pytest.raises(ValueError, match=rf"new_logp has shape \(3,\), but the plan holds {tokens.tokens} tokens"):
        objective.loss(torch.zeros(3), plan)
    with pytest.raises(ValueError, match=r"batch\.pack"):
        objective.loss(torch.zeros(6, 11), plan)


@pytest.mark.parametrize(("sizes", "words"), [(0, "at least 1"), ([1, 2], "add up to"), ([-1, 7], "non-negative")])
def test_parts_that_do_not_fit_are_refused(sizes: int | list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tt.objective("grpo").plan(batch(0)).split(sizes)


def test_pack_and_unpack_say_what_they_take() -> None:
    tokens = batch(0)
    with pytest.raises(ValueError, match=r"has shape \(2, 2\), but the mask has \(6, 11\)"):
        tokens.pack(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="one value per token"):
        tokens.unpack(torch.zeros(3))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "has the controllers"),
        ({"stare": {"boost": 1.0}}, "has the keys"),
        ({"stare": {"is_open": 1.0, "boost": float("nan"), "damp": 1.0}}, "finite numbers"),
    ],
)
def test_a_foreign_state_changes_nothing(state: dict[str, dict[str, float]], words: str) -> None:
    objective = tt.objective("stare")
    before = objective.state_dict()
    with pytest.raises(ValueError, match=words):
        objective.load_state_dict(state)
    assert objective.state_dict() == before


# --- values of the wrong sign


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("old_logp", [-1.0, 5.0, -2.0], "logits, without log_softmax"),
        ("old_logp", [1e4, 2.0, 3.0], "the sign turned round"),
        ("old_logp", [0.2, 0.9, 0.5], "probabilities, of which to take the logarithm"),
        ("ref_logp", [0.2, 0.9, 0.5], "probabilities, of which"),
        ("sampler_logp", [3.0, 1.0, 2.0], "the sign turned round"),
        ("entropy", [0.1, -0.5, 0.2], "an entropy is not below 0; is it sum p ln p"),
        ("sum_p2", [0.1, -0.5, 0.2], "sum of p^2 over the vocabulary, which is not below 0"),
        ("sum_p2_logp", [-0.1, 0.5, -0.2], "p^2 ln p over the vocabulary, which is not above 0"),
    ],
)
def test_a_value_of_the_wrong_sign_names_the_field_and_the_likely_mistake(
    field: str, values: list[float], words: str
) -> None:
    given = {"old_logp": -torch.ones(3), "advantage": torch.ones(3), "sequence": torch.tensor([0, 0, 1])}
    with pytest.raises(ValueError, match=rf"TokenBatch field `{field}` is .* at response \d, token \d: ") as error:
        tt.TokenBatch(**given | {field: torch.tensor(values)})
    assert words in str(error.value)


def test_rounding_above_zero_is_no_mistake() -> None:
    tiny = torch.tensor([1e-4, 0.0, -1.0])
    tt.TokenBatch(
        old_logp=tiny, advantage=torch.ones(3), sequence=torch.zeros(3), sampler_logp=tiny, entropy=-tiny.abs() / 100
    )


def test_the_moments_of_logits_that_are_nan_are_nan() -> None:
    found = tt.theory.moments(torch.tensor([[math.nan, 1.0], [1.0, -math.inf]]), torch.tensor([0, 0]))
    assert [math.isnan(value) for value in found.entropy.tolist()] == [True, False]
    assert found.entropy[1] == 0
