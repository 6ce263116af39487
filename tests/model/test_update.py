"""Scoring and updating give the same numbers for all sizes of micro-batches and chunks."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import trimtab as tt
from trimtab.objectives.theory import moments
from trimtab.trainer.model import (
    Policy,
    Transcript,
    UpdateOptions,
    load_policy,
    make_optimizer,
    pick_device,
    score,
    update,
)
from trimtab.trainer.model.score import log_probs, micro_batch_sizes, split_by_token_budget

METHODS = ("grpo", "stapo", "stare", "sspo", "gspo", "cispo", "sspo + s2t(tau_p=0.3)", "vespo")


@pytest.fixture
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


def transcripts(count: int = 12) -> list[Transcript]:
    rng = torch.Generator().manual_seed(0)

    def sample(most: int) -> list[int]:
        length = int(torch.randint(1, most, (1,), generator=rng))
        return torch.randint(2, 17, (length,), generator=rng).tolist()

    return [Transcript(sample(9), sample(8)) for _ in range(count)]


def batch_of(policy: Policy, sequences: list[Transcript]) -> tt.TokenBatch:
    measured = score(policy, sequences, 1.0, token_budget=4096, head_chunk=4096)
    lengths = torch.tensor([len(transcript.response) for transcript in sequences])
    sequence = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    advantage = torch.linspace(-1, 1, len(sequences))[sequence]
    segment = torch.arange(len(sequence)) // 3
    return tt.TokenBatch(
        old_logp=measured.logp, entropy=measured.entropy, advantage=advantage, sequence=sequence, segment=segment
    )


def test_scores_are_those_of_full_logits(policy: Policy) -> None:
    sequences = transcripts()
    scored = score(policy, sequences, 0.8, token_budget=50, head_chunk=5)
    expected = []
    with torch.no_grad():
        for transcript in sequences:
            logits = policy.model(input_ids=torch.tensor([[*transcript.prompt, *transcript.response]])).logits[0]
            rows = logits[len(transcript.prompt) - 1 : -1] / 0.8
            expected.append(moments(rows, torch.tensor(transcript.response)))
    for mine, theirs in zip(scored, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 77, 10_000])
@pytest.mark.parametrize("chunk", [1, 6, 10_000])
def test_budget_and_chunk_change_scores_by_rounding_alone(policy: Policy, budget: int, chunk: int) -> None:
    base = score(policy, transcripts(), 1.0, token_budget=10_000, head_chunk=10_000)
    for mine, theirs in zip(score(policy, transcripts(), 1.0, budget, chunk), base, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [([], 10, []), ([5], 1, [1]), ([5, 5, 5], 10, [2, 1]), ([1, 1, 8, 8], 16, [2, 2]), ([3, 3, 3, 3], 100, [4])],
)
def test_micro_batches_stay_within_the_token_budget(lengths: list[int], budget: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(lengths, budget) == sizes


def test_micro_batches_hold_every_transcript_once() -> None:
    sequences = transcripts()
    micros = list(split_by_token_budget(sequences, 40))
    assert [transcript for micro in micros for transcript in micro] == sequences
    assert all(len(micro) == 1 or len(micro) * max(map(len, micro)) <= 40 for micro in micros)


def updated(
    policy: Policy, objective: tt.Objective, budget: int, chunk: int, fused: bool = False
) -> tuple[dict[str, torch.Tensor], float]:
    mine = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.device, policy.precision)
    sequences = transcripts()
    plan = objective.plan(batch_of(mine, sequences))
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1)
    result = update(mine, optimizer, objective, plan, sequences, UpdateOptions(budget, chunk, 1.0, 1e9, fused))
    assert result.taken
    assert result.new_logp is not None
    assert len(result.new_logp) == plan.tokens
    assert result.clipped is None or len(result.clipped) == plan.tokens
    return {name: p.detach() for name, p in mine.model.named_parameters()}, result.metrics["update/loss"]


@pytest.mark.parametrize("name", METHODS)
def test_the_update_does_not_depend_on_micro_batches(policy: Policy, name: str) -> None:
    base, loss = updated(policy, tt.objective(name), budget=100_000, chunk=100_000)
    before = dict(policy.model.named_parameters())
    assert max((base[n] - before[n]).abs().max().item() for n in base) > 1e-5
    for budget, chunk in ((20, 100_000), (1, 3), (60, 5)):
        other, same_loss = updated(policy, tt.objective(name), budget, chunk)
        assert same_loss == pytest.approx(loss, abs=1e-5)
        for n in base:
            torch.testing.assert_close(other[n], base[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", [*METHODS, "stapo(scope=micro)", "gspo(scope=micro)", "lp_reg", "gmpo", "dppo", "luspo"]
)
def test_gradients_formed_in_the_forward_pass_are_the_same(policy: Policy, name: str) -> None:
    base, loss = updated(policy, tt.objective(name), budget=60, chunk=100_000)
    for chunk in (100_000, 9, 3):  # whole micro-batches, whole responses, and fewer tokens than a response has
        other, same_loss = updated(policy, tt.objective(name), 60, chunk, fused=True)
        assert same_loss == pytest.approx(loss, abs=1e-5)
        for n in base:
            torch.testing.assert_close(other[n], base[n], rtol=1e-4, atol=1e-6)


def test_the_head_is_fused_on_a_cpu_only_if_enabled(policy: Policy) -> None:
    assert policy.fused_head(1.0, None) is None
    assert policy.fused_head(1.0, True) is not None
    sequences = transcripts()
    plain, default, fused = (score(policy, sequences, 0.8, 50, 5, wanted) for wanted in (False, None, True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(default, plain, strict=True))
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def test_an_update_reports_the_sizes_of_its_micro_batches(policy: Policy) -> None:
    sequences, objective = transcripts(), tt.objective("grpo")
    plan = objective.plan(batch_of(policy, sequences))
    optimizer = make_optimizer(policy, 1e-3, (0.9, 0.999), 0.0)
    result = update(policy, optimizer, objective, plan, sequences, UpdateOptions(40, 1000, 1.0, 1.0))
    assert result.micro_batch_sizes == [len(micro) for micro in split_by_token_budget(sequences, 40)]
    assert len(result.micro_batch_sizes) > 1


def test_a_transcript_is_one_array_made_once() -> None:
    transcript = Transcript((3, 4), [5])
    assert transcript.ids.tolist() == [3, 4, 5]
    assert transcript.ids is transcript.ids
    assert transcript == Transcript((3, 4), [5])


def test_bf16_gradients_formed_in_the_forward_pass_are_as_good(policy: Policy) -> None:
    half, objective = replace(policy, precision="bf16"), tt.objective("stapo")
    exact, _ = updated(policy, objective, 1000, 1000)
    before = {n: p.detach() for n, p in policy.model.named_parameters()}
    off: list[float] = []
    for fused in (False, True):
        made, _ = updated(half, objective, 1000, 1000, fused)
        steps = [(made[n] - exact[n]).norm() / (exact[n] - before[n]).norm().clamp(min=1e-12) for n in made]
        off.append(max(float(step) for step in steps))
    assert off[1] < 1.2 * off[0]


def test_a_head_that_is_not_a_plain_linear_layer_is_left_to_autograd(policy: Policy) -> None:
    base, _ = updated(policy, tt.objective("stapo"), 1000, 1000)

    class Odd(torch.nn.Linear):
        pass

    policy.causal_lm.get_output_embeddings().__class__ = Odd
    assert policy.head_tensors(1.0) is None
    other, _ = updated(policy, tt.objective("stapo"), 1000, 1000, fused=True)
    assert all(torch.equal(other[n], base[n]) for n in base)


def test_tokens_that_share_a_ratio_cannot_be_cut_apart(policy: Policy) -> None:
    batch = batch_of(policy, transcripts())
    cut_out = tt.objective("stapo").plan(batch).cut(3, 8)
    assert torch.equal(cut_out.old_logp, batch.old_logp[3:8])
    assert (cut_out.tokens, cut_out.responses, cut_out.slice) == (5, 1, slice(3, 8))
    with pytest.raises(ValueError, match="cannot be cut apart"):
        tt.objective("gspo").plan(batch).cut(3, 8)


def test_gradient_checkpointing_changes_nothing(policy: Policy) -> None:
    base, _ = updated(policy, tt.objective("stapo"), 1000, 1000)
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    other, _ = updated(policy, tt.objective("stapo"), 1000, 1000)
    for n in base:
        torch.testing.assert_close(other[n], base[n], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", METHODS)
def test_the_update_reports_the_loss_of_the_objective(policy: Policy, name: str) -> None:
    sequences, objective = transcripts(), tt.objective(name)
    plan = objective.plan(batch_of(policy, sequences))
    policy.model.train()
    new = log_probs(policy, sequences, 1.0, 1000)
    expected = objective.loss(new.detach(), plan).loss.item()
    optimizer = make_optimizer(policy, 1e-3, (0.9, 0.999), 0.0)
    result = update(policy, optimizer, objective, plan, sequences, UpdateOptions(10_000, 1000, 1.0, 1.0))
    assert result.metrics["update/loss"] == pytest.approx(expected, abs=1e-7)
    assert result.metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_bf16_trains_fp32_weights(policy: Policy) -> None:
    half = Policy(policy.model, policy.tokenizer, policy.device, precision="bf16")
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    scored = score(half, transcripts(), 1.0, 1000, 1000)
    assert scored.logp.dtype == torch.float32
    exact = score(policy, transcripts(), 1.0, 1000, 1000)
    assert 0 < (scored.logp - exact.logp).abs().max() < 0.1


def test_an_unknown_device_or_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"run\.device='gpu7' is no device"):
        pick_device("gpu7")
    with pytest.raises(ValueError, match=r"model\.path='\./nowhere': there is no such folder"):
        load_policy("./nowhere", device="cpu")


def test_a_transcript_without_a_prompt_is_refused() -> None:
    """Its first token would be scored by the end of another transcript."""
    with pytest.raises(ValueError, match="nothing predicts its response's first token"):
        Transcript([], [4, 5])


@pytest.mark.parametrize("name", ["meta", "vulkan", "hpu"])
def test_a_device_that_torch_cannot_use_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"run\.device='{name}', which torch cannot use here: say auto, cpu or cuda"):
        pick_device(name)


def test_the_cpu_may_be_given_with_an_index() -> None:
    assert load_policy("demo", device="cpu:0").device.type == "cpu"


def test_the_gpu_that_is_named_must_be_there_and_is_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, where: self)
    monkeypatch.setattr("trimtab.trainer.model.loading._check_logits", lambda policy: None)
    with pytest.raises(ValueError, match=r"run\.device='cuda:2', but torch sees 2 GPUs"):
        pick_device("cuda:2")
    assert load_policy("demo", device="cuda:1").device == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    load_policy("demo", device="cuda")
    load_policy("demo", device="cpu")
    assert len(current) == 1, "without an index the current device stays"


def test_a_saved_policy_loads_by_its_folder(policy: Policy, tmp_path: Path) -> None:
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path), device="cpu")
    assert again.encode([{"role": "user", "content": "12+3="}]) == policy.encode([{"role": "user", "content": "12+3="}])
    mine, yours = (score(p, transcripts(), 1.0, 1000, 1000).logp for p in (policy, again))
    assert torch.equal(mine, yours)
    assert again.eos_token_ids == policy.eos_token_ids


def test_a_model_that_changes_its_logits_is_refused(policy: Policy) -> None:
    from trimtab.trainer.model.loading import _check_logits

    _check_logits(policy)
    policy.causal_lm.config.final_logit_softcapping = 0.01  # which the model itself does not apply
    with pytest.raises(ValueError, match="does more to its logits"):
        _check_logits(policy)


def test_lora_trains_its_adapters_alone() -> None:
    pytest.importorskip("peft")
    policy = load_policy("demo", device="cpu", seed=3, lora_rank=2, gradient_checkpointing=True)
    plain = load_policy("demo", device="cpu", seed=3)
    sequences, objective = transcripts(), tt.objective("stapo")
    # A fresh adapter changes nothing.
    torch.testing.assert_close(score(policy, sequences, 1.0, 999, 99).logp, score(plain, sequences, 1.0, 999, 99).logp)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    optimizer = make_optimizer(policy, 1e-2, (0.9, 0.999), 0.0)
    plan = objective.plan(batch_of(policy, sequences))
    for fused in (None, True):
        options = UpdateOptions(999, 99, 1.0, 1.0, fused_head=fused)
        assert update(policy, optimizer, objective, plan, sequences, options).taken
    changed = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and changed <= trained


@pytest.mark.parametrize("budget", [20, 100_000])
def test_the_effective_sample_share_is_that_of_the_whole_mini_batch(policy: Policy, budget: int) -> None:
    sequences, objective = transcripts(), tt.objective("grpo")
    batch = batch_of(policy, sequences)
    moved = torch.linspace(-2, 2, batch.tokens)
    plan = objective.plan(replace(batch, old_logp=batch.old_logp - 3 + moved))
    model = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.device)
    optimizer = make_optimizer(model, 1e-3, (0.9, 0.999), 0.0)
    result = update(model, optimizer, objective, plan, sequences, UpdateOptions(budget, 1000, 1.0, 1.0))
    assert result.new_logp is not None
    ratios = np.exp((result.new_logp - plan.old_logp).double().numpy())
    expected = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert 0.1 < expected < 0.9
    assert result.metrics["update/effective_sample_share_min"] == pytest.approx(expected)
