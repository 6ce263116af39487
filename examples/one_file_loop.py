"""Reinforcement learning of a language model in one file: sample, grade, plan, update.

A tiny transformer with random weights learns sums such as `3+4=` from rewards only, on one CPU core, in less than a
minute. Everything is here but the loss, which is trimtab's, and the grader. Read it from top to bottom:

    python examples/one_file_loop.py                      # STAPO
    python examples/one_file_loop.py "dapo + trim"        # any method: trimtab methods

For a real model replace `build_model` by AutoModelForCausalLM.from_pretrained, the vocabulary by its tokenizer, and
`sample` by vLLM. trimtab's own trainer does this and more: `trimtab train`.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import trimtab as tt
from trimtab.data import Problem
from trimtab.grading import grade_many

# --- The task: prompts, answers, and the rule that grades a response -------------------------------------------------

VOCABULARY = "0123456789+=."  # one token per character; the point ends a response
END = VOCABULARY.index(".")
PROMPT_TOKENS = 4  # `3+4=`
METHOD = "stapo(tau_p=0.02)"  # a vocabulary of 13 has fewer rare tokens than one of 150 thousand


def make_problem(a: int, b: int) -> Problem:
    """Return a sum as trimtab's graders take it: chat messages, the answer, and the name of the rule."""
    prompt = ({"role": "user", "content": f"{a}+{b}="},)
    return Problem(prompt, answer=f"{a + b}.", rule="exact", source="sums")


PROBLEMS = [make_problem(a, b) for a in range(5) for b in range(5)]


def encode(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [VOCABULARY.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """Return the text of tokens."""
    return "".join(VOCABULARY[token] for token in ids)


# --- The policy: a model, sampling from it, and scoring what was sampled ---------------------------------------------


def build_model() -> Qwen3ForCausalLM:
    """Return a transformer with 0.1 million random weights."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )
    return Qwen3ForCausalLM(config)


@dataclass
class Rollouts:
    """The responses of a step: tokens of prompt and response, which of them were sampled, their rewards and groups."""

    ids: Tensor  # (responses, tokens)
    mask: Tensor  # (responses, tokens - 1): True where the model sampled the next token
    reward: Tensor  # one per response
    group: Tensor  # one per response: the number of its prompt


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return prompts with sampled responses, padded with END behind their own end."""
    ids = prompts
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(new_tokens):
        probability = model(input_ids=ids).logits[:, -1].softmax(-1)
        token = torch.multinomial(probability, 1).squeeze(1).masked_fill(ended, END)
        ids = torch.cat([ids, token[:, None]], dim=1)
        ended |= token == END
    return ids


def score(model: Qwen3ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every token after the first, and the entropy of the model at its position."""
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def collect(model: Qwen3ForCausalLM, prompts: int, samples: int, new_tokens: int) -> Rollouts:
    """Sample several responses to each of several prompts, and grade them."""
    problems = [problem for problem in random.choices(PROBLEMS, k=prompts) for _ in range(samples)]
    ids = sample(model, torch.tensor([encode(p.prompt[0]["content"]) for p in problems]), new_tokens)
    responses = ids[:, PROMPT_TOKENS:]
    # A response ends with its first END. What follows is padding, which nobody sampled and nobody is to train on.
    sampled = (responses == END).cumsum(1) - (responses == END).long() == 0
    texts = [decode(row[keep].tolist()) for row, keep in zip(responses, sampled, strict=True)]
    verdicts = grade_many(zip(texts, problems, strict=True))
    mask = torch.cat([torch.zeros(len(ids), PROMPT_TOKENS - 1, dtype=torch.bool), sampled], dim=1)
    reward = torch.tensor([float(verdict.kind == "correct") for verdict in verdicts])
    return Rollouts(ids, mask, reward, group=torch.arange(len(ids)) // samples)


# --- The update: a plan of the whole mini-batch, then the loss of each micro-batch -----------------------------------


def update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    objective: tt.Objective,
    rollouts: Rollouts,
    micro_batch_size: int = 128,
) -> tuple[tt.TokenBatch, tt.Plan]:
    """Take one optimizer step; return the batch, and the plan with what the method decided about each token."""
    with torch.no_grad():
        old_logp, entropy = score(model, rollouts.ids)
    batch = tt.TokenBatch.from_padded(
        rollouts.mask,
        old_logp=old_logp,
        entropy=entropy,
        token=rollouts.ids[:, 1:],
        advantage=objective.advantages(rollouts.reward, rollouts.group),
        group=rollouts.group,
        reward=rollouts.reward,
    )
    objective.observe(batch)  # methods with a controller, such as STARE, follow the entropy
    plan = objective.plan(batch)  # which tokens are silenced, boosted or clipped, and why
    optimizer.zero_grad()
    rows = torch.arange(len(rollouts.ids)).split(micro_batch_size)
    for row, micro_batch in zip(rows, plan.split(micro_batch_size), strict=True):
        new_logp, _ = score(model, rollouts.ids[row])
        objective.loss(new_logp[rollouts.mask[row]], micro_batch).loss.backward()  # the losses add up
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return batch, plan


# --- The loop --------------------------------------------------------------------------------------------------------


def train(name: str = METHOD, steps: int = 120, seed: int = 0) -> list[float]:
    """Train, print what happens, and return the share of right responses of every step."""
    random.seed(seed)
    torch.manual_seed(seed)
    model, objective = build_model(), tt.objective(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    print(objective.explain().splitlines()[0])
    right = []
    for step in range(1, steps + 1):
        rollouts = collect(model, prompts=32, samples=16, new_tokens=3)
        batch, plan = update(model, optimizer, objective, rollouts)
        right.append(float(rollouts.reward.mean()))
        if step == 1 or step % 10 == 0:
            assert batch.entropy is not None
            silenced = float((plan.weight == 0).float().mean())
            shown = decode(rollouts.ids[0].tolist())
            print(f"step {step:3}  right {right[-1]:4.0%}  entropy {float(batch.entropy.mean()):.2f}  "
                  f"silenced {silenced:5.1%}  e.g. {shown}")  # fmt: skip
    token = int(plan.advantage.ne(0).nonzero()[0])
    print(f"token {token} of the last update: {plan.why(token)}")
    return right


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1] if len(sys.argv) > 1 else METHOD)
