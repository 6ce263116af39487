"""The head over kept tokens and the gradient of the entropy, against autograd on full logits in fp64."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trimtab as tt
from trimtab.data import KeptTokens
from trimtab.objectives.theory import moments
from trimtab.trainer.model import Policy, Transcript, UpdateOptions, load_policy, score, update
from trimtab.trainer.model.kept_rows import KeptRows
from trimtab.trainer.model.lm_head import Head, head_gradients, head_scores
from trimtab.trainer.model.score import log_probs_and_entropies

CPU = torch.device("cpu")
ROWS, VOCABULARY = 37, 101  # 4 words of bits: some rows keep fewer tokens, and hold their ids
HEADS = list(product((None, 3.0), (False, True), (1.0, 0.7)))  # soft cap, bias, temperature


def made_head(cap: float | None, bias: bool, temperature: float, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCABULARY, 16, generator=generator, dtype=torch.float64)
    offset = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    return Head(weight.to(dtype), offset, cap, temperature)


def made_rows(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor, np.ndarray]:
    """Hidden states, sampled tokens, and a mask of what was kept: from the token alone to the whole vocabulary."""
    rng = np.random.default_rng(seed)
    hidden, token = rng.normal(size=(rows, 16)), rng.integers(0, VOCABULARY, rows)
    mask = rng.random((rows, VOCABULARY)) < rng.choice([0.0, 0.02, 0.3, 1.0], (rows, 1))
    mask[np.arange(rows), token] = True
    return torch.from_numpy(hidden), torch.from_numpy(token), mask


def kept_rows(mask: np.ndarray) -> KeptRows:
    kept = KeptRows.of([KeptTokens.from_mask(part) for part in np.array_split(mask, 3)], CPU)
    assert kept is not None
    return kept


def masked_logits(hidden: Tensor, head: Head, mask: np.ndarray | None) -> Tensor:
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    if head.soft_cap:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    logits = logits / head.temperature
    return logits if mask is None else logits.masked_fill(~torch.from_numpy(mask), -torch.inf)


def true_entropy(logits: Tensor) -> Tensor:
    """The entropy of every row by torch's own distribution, which knows no kept tokens."""
    rows = [row[row > -torch.inf] for row in logits]
    return torch.stack([torch.distributions.Categorical(logits=row).entropy() for row in rows])


@pytest.mark.parametrize(("cap", "bias", "temperature"), HEADS)
def test_scores_are_those_of_full_logits_with_the_others_at_minus_infinity(
    cap: float | None, bias: bool, temperature: float
) -> None:
    head, (hidden, token, mask) = made_head(cap, bias, temperature), made_rows()
    logits = masked_logits(hidden, head, mask)
    expected = moments(logits, token)
    for chunk in (1, 10, 1000):
        found = head_scores(hidden, head, token, chunk, kept_rows(mask))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.entropy, true_entropy(logits), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [None, [37], [20, 17], [1] * 37, [0, 30, 0, 7]])
@pytest.mark.parametrize("terms", ["logp", "entropy", "both"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("cap", "bias", "temperature"), [HEADS[0], HEADS[-1]])
def test_gradients_are_those_of_autograd(
    cap: float | None, bias: bool, temperature: float, truncated: bool, terms: str, sizes: list[int] | None
) -> None:
    head, (hidden, token, mask) = made_head(cap, bias, temperature), made_rows()
    advantage = torch.linspace(-1, 2, ROWS, dtype=torch.float64) * (terms != "entropy")
    coefficient = torch.linspace(-0.3, 0.5, ROWS, dtype=torch.float64) if terms != "logp" else None
    leaves = [hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()]
    leaves += [] if head.bias is None else [head.bias.clone().requires_grad_()]
    mine = replace(head, weight=leaves[1], bias=None if head.bias is None else leaves[2])
    logits = masked_logits(leaves[0], mine, mask if truncated else None)
    logp = logits.log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    loss = (advantage * (logp + 3).exp()).sum()
    if coefficient is not None:
        loss = loss + (coefficient * true_entropy(logits)).sum()
    expected = torch.autograd.grad(loss, leaves)

    def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        term = advantage[rows] * (logp + 3).exp()
        return term.sum(), term

    kept = kept_rows(mask) if truncated else None
    made = head_gradients(hidden, head, token, loss_fn, sizes, kept=kept, entropy_grad=coefficient)
    for one, other in zip((made.hidden, made.weight, made.bias), expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(made.logp, logp.detach(), rtol=1e-10, atol=1e-12)
    assert (made.entropy is None) == (coefficient is None)
    if made.entropy is not None:
        torch.testing.assert_close(made.entropy, true_entropy(logits).detach(), rtol=1e-10, atol=1e-12)


@given(seed=st.integers(0, 10_000), chunk=st.integers(1, 40), truncated=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_the_entropy_is_its_change_along_any_direction(seed: int, chunk: int, truncated: bool) -> None:
    head, (hidden, token, mask) = made_head(None, False, 1.0), made_rows(seed, 9)
    kept = kept_rows(mask) if truncated else None
    rng = np.random.default_rng(seed)
    coefficient, direction = torch.from_numpy(rng.normal(size=9)), torch.from_numpy(rng.normal(size=hidden.shape))

    def nothing(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return logp.new_zeros(()), torch.zeros_like(logp)

    def value(step: float) -> float:
        return float((coefficient * head_scores(hidden + step * direction, head, token, chunk, kept).entropy).sum())

    sizes = [min(chunk, 9 - first) for first in range(0, 9, chunk)]
    made = head_gradients(hidden, head, token, nothing, sizes, kept=kept, entropy_grad=coefficient)
    change = (value(1e-5) - value(-1e-5)) / 2e-5
    assert change == pytest.approx(float((made.hidden * direction).sum()), rel=1e-5, abs=1e-7)


@given(seed=st.integers(0, 10_000), chunk=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_nothing_is_left_of_a_token_that_was_not_kept(seed: int, chunk: int) -> None:
    head, (hidden, token, mask) = made_head(None, True, 1.0), made_rows(seed)
    kept = kept_rows(mask)
    never = ~mask.any(0)
    louder = replace(head, bias=head.bias + 50.0 * torch.from_numpy(never))  # type: ignore[operator]
    for mine, theirs in zip(
        head_scores(hidden, louder, token, chunk, kept), head_scores(hidden, head, token, chunk, kept), strict=True
    ):
        assert torch.equal(mine, theirs)
    everything = KeptRows.of([KeptTokens.from_mask(np.ones_like(mask))], CPU)
    for mine, theirs in zip(
        head_scores(hidden, head, token, chunk, everything), head_scores(hidden, head, token, chunk), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("truncated", [False, True])
def test_half_precision_keeps_small_coefficients(dtype: torch.dtype, truncated: bool) -> None:
    exact, (hidden, token, mask) = made_head(None, False, 1.0), made_rows(3)
    head = made_head(None, False, 1.0, dtype)
    kept = kept_rows(mask) if truncated else None
    coefficient = torch.full((ROWS,), 3e-7)

    def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return logp.sum() * 1e-7, torch.full_like(logp, 1e-7)

    rounded = hidden.to(dtype)
    weight = torch.zeros(VOCABULARY, 16)
    made = head_gradients(rounded, head, token, loss_fn, kept=kept, entropy_grad=coefficient, weight_grad=weight)
    truth = replace(exact, weight=head.weight.double())
    wanted = head_gradients(rounded.double(), truth, token, loss_fn, kept=kept, entropy_grad=coefficient.double())
    assert made.weight is not None and wanted.weight is not None
    assert float((made.weight.double() - wanted.weight).norm() / wanted.weight.norm()) < 2e-2


def test_what_does_not_fit_is_named() -> None:
    head, (hidden, token, mask) = made_head(None, False, 1.0), made_rows()
    other = KeptRows.of([KeptTokens.from_mask(mask[:, :50])], CPU)
    with pytest.raises(ValueError, match=r"vocabulary of 50, but the trainer has 101 logits.*the same model"):
        head_scores(hidden, head, token, 10, other)
    with pytest.raises(ValueError, match="1 of 2 responses came without the tokens that top-k and top-p kept"):
        KeptRows.of([KeptTokens.from_mask(mask), None], CPU)
    with pytest.raises(ValueError, match="2 sampled tokens with kept tokens for 37"):
        Transcript([1], [2, 3], kept=KeptTokens.from_mask(mask))


# --- in a model: scoring and updating


@pytest.fixture
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


def transcripts(policy: Policy, share: float, count: int = 12) -> list[Transcript]:
    """Transcripts whose tokens were kept with so many others."""
    rng, vocabulary = np.random.default_rng(0), len(policy.lm_head.weight)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        response = rng.integers(2, 17, rng.integers(1, 8))
        mask = rng.random((len(response), vocabulary)) < share
        mask[np.arange(len(response)), response] = True
        found.append(Transcript(rng.integers(2, 17, 5).tolist(), response, kept=KeptTokens.from_mask(mask)))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize("chunk", [1, 6, 10_000])
def test_scores_do_not_depend_on_budget_and_chunk(policy: Policy, fused: bool, budget: int, chunk: int) -> None:
    rows = transcripts(policy, 0.4)
    found = score(policy, rows, 0.8, budget, chunk, fused)
    expected = []
    with torch.no_grad():
        for row in rows:
            logits = policy.model(input_ids=torch.from_numpy(row.ids)[None]).logits[0, len(row.prompt) - 1 : -1] / 0.8
            assert row.kept is not None
            logits = logits.masked_fill(~torch.from_numpy(row.kept.mask()), -torch.inf)
            expected.append(moments(logits, torch.from_numpy(row.sampled_tokens)))
    for mine, theirs in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        logp, entropy = log_probs_and_entropies(policy, rows, 0.8, chunk)
    torch.testing.assert_close(logp, found.logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, found.entropy, rtol=1e-4, atol=1e-5)


METHODS = ("grpo", "gspo", "stapo(scope=micro)", "dapo + entropy_bonus(coef=0.3, gradient=exact)")
METHODS += ("gspo + entropy_bonus(coef=0.3, gradient=exact)", "dapo(scope=micro) + entropy_bonus(gradient=exact)")


def updated(
    policy: Policy, name: str, rows: list[Transcript], budget: int, chunk: int, fused: bool
) -> tuple[dict[str, Tensor], float]:
    mine = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.device, policy.precision)
    objective, found = tt.objective(name), score(mine, rows, 1.0, 4096, 4096)
    sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.response) for row in rows]))
    batch = tt.TokenBatch(
        old_logp=found.logp,
        entropy=found.entropy,
        advantage=torch.linspace(-1, 1, len(rows))[sequence],
        sequence=sequence,
    )
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1)
    options = UpdateOptions(budget, chunk, 1.0, 1e9, fused)
    result = update(mine, optimizer, objective, objective.plan(batch), rows, options)
    assert result.taken
    return {n: p.detach() for n, p in mine.model.named_parameters()}, result.metrics["update/loss"]


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_an_update_depends_neither_on_chunks_nor_on_the_fused_head(policy: Policy, name: str, truncated: bool) -> None:
    rows = transcripts(policy, 0.4)
    rows = rows if truncated else [replace(row, kept=None) for row in rows]
    base, loss = updated(policy, name, rows, 60, 10_000, fused=False)
    before = dict(policy.model.named_parameters())
    assert max((base[n] - before[n]).abs().max().item() for n in base) > 1e-5
    # A plan made by micro-batch depends on these, as it is meant to.
    budgets = (60,) if "micro" in name else (60, 20, 1)
    for budget, chunk, fused in product(budgets, (10_000, 9, 3), (False, True)):
        other, same_loss = updated(policy, name, rows, budget, chunk, fused)
        assert same_loss == pytest.approx(loss, abs=1e-5)
        for n in base:
            torch.testing.assert_close(other[n], base[n], rtol=1e-4, atol=1e-6)


def test_the_exact_bonus_raises_the_entropy_where_there_is_no_other_signal(policy: Policy) -> None:
    rows = [replace(row, kept=None) for row in transcripts(policy, 0.4)]
    entropies = []
    for name in ("dapo", "dapo + entropy_bonus(coef=1.0, gradient=exact)"):
        mine = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.device, policy.precision)
        with torch.no_grad():
            mine.lm_head.weight *= 3.0  # type: ignore[operator]  # far from uniform
        objective, found = tt.objective(name), score(mine, rows, 1.0, 4096, 4096)
        sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.response) for row in rows]))
        batch = tt.TokenBatch(
            old_logp=found.logp, entropy=found.entropy, advantage=torch.zeros(len(sequence)), sequence=sequence
        )
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.01)
        for _ in range(5):
            update(mine, optimizer, objective, objective.plan(batch), rows, UpdateOptions(4096, 9, 1.0, 1.0, True))
        entropies.append(float(score(mine, rows, 1.0, 4096, 4096).entropy.mean() - found.entropy.mean()))
    assert entropies[0] == pytest.approx(0.0, abs=1e-6)
    assert entropies[1] > 0.01
