"""Word problems in free text, and a tiny word-level model for them: where rare tokens of right responses get rewarded.

A problem is a number and changes to it (`46 ropa 2 pega 8`). Its worked solution repeats each change with the new
total, in words that are interchangeable and have a long tail (Zipf). Only its last number is graded. Here and there a
slip stands in place of the right token. So a policy that has learned such texts writes a rare word in a confident
context now and then, and is right all the same: STAPO's spurious token.
"""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from trimtab.data import FixedTask, Problem, Split, TaskOption, user
from trimtab.data.problems import derive_seed, split_of
from trimtab.record import open_run

PAD, END = "<pad>", "<end>"
NUMBERS = [str(number) for number in range(100)]
WORDS = ["".join(syllables) for syllables in product(map("".join, product("bdfgklmnprstvz", "aeiou")), repeat=2)]
WORDS = random.Random(0).sample(WORDS, 1100)
# How many words a slot has, and the exponent of their Zipf law: 1 is flat, 3 leaves 17 % to all but the first word.
SLOTS = {"open": (200, 1.0), "gain": (20, 1.5), "loss": (20, 1.5), "makes": (100, 3.0), "then": (100, 3.0),
         "so": (200, 1.0), "close": (460, 1.0)}  # fmt: skip
TEST_ONE_IN = 10  # one question in ten is held out


@cache
def _slot(name: str) -> tuple[list[str], list[float]]:
    """Return the words of a slot and their cumulative weights; `slip` has all words."""
    sizes = dict(zip(SLOTS, accumulate(size for size, _ in SLOTS.values()), strict=True))
    size, exponent = SLOTS.get(name, (len(WORDS), 1.0))
    words = WORDS[sizes.get(name, len(WORDS)) - size :][:size]
    return words, [*accumulate(rank**-exponent for rank in range(1, size + 1))]


def _word(rng: random.Random, slot: str) -> str:
    words, weights = _slot(slot)
    return rng.choices(words, cum_weights=weights)[0]


def _problem(rng: random.Random, changes: int, slips: float) -> tuple[str, str, str]:
    """Return a question, its answer and a worked solution."""
    total = rng.randrange(100)
    question, worked = [str(total)], [_word(rng, "open"), str(total)]
    for change in range(changes):
        number = rng.randint(1, 9)
        slot = "loss" if total + number > 99 or (total >= number and rng.random() < 0.5) else "gain"
        total += number if slot == "gain" else -number
        verb = _word(rng, slot)
        question += [verb, str(number)]
        worked += [*([_word(rng, "then")] if change else []), verb, str(number), _word(rng, "makes"), str(total)]
    worked = [_word(rng, "slip") if rng.random() < slips else token for token in worked]
    closing = [_word(rng, "close") for _ in range(rng.randrange(4))]
    return " ".join(question), str(total), " ".join([*worked, _word(rng, "so"), str(total), *closing])


def word_problems(
    split: Split,
    changes: Annotated[int, TaskOption("how many changes a problem has", 1, 9)] = 3,
    slips: Annotated[float, TaskOption("share of the tokens of worked solutions that are slips", 0, 1)] = 0.005,
    size: Annotated[int, TaskOption("number of problems per epoch", 1, 1_000_000)] = 10_000,
) -> FixedTask:
    """Return problems whose free-text solutions are graded by their last number."""
    problems: list[Problem] = []
    for attempt in range(100 * size):
        question, answer, solution = _problem(random.Random(derive_seed("spurious", split, attempt)), changes, slips)
        if split_of(question, TEST_ONE_IN) == split:
            problems.append(Problem(user(question), answer, "number", "spurious", solution=solution))
        if len(problems) == size:
            break
    return FixedTask("spurious", problems)


def save_model(folder: Path, seed: int = 0) -> Path:
    """Save a Qwen3 of 0.19 million parameters with random weights and one token per word; return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: number for number, token in enumerate([PAD, END, *NUMBERS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_warm_model(folder: Path) -> Path:
    """Return the folder of a model after the recipe's warm start, which all runs share; train it if it is not there."""
    model = folder / "warm/model"
    if not model.exists():
        settings = (f"model.path={save_model(folder / 'fresh')}", "run.steps=1", "update.lr=1e-9", "run.report=false")
        command = [sys.executable, "-P", "-m", "trimtab", "train", str(Path(__file__).with_suffix(".toml")), "--quiet"]
        command += [f"--set={setting}" for setting in settings]
        subprocess.run([*command, "--out", str(model.parent)], check=True)
    return model


def rare_tokens(folder: Path, tau_p: float, quantile: float = 0.75, window: int = 10) -> dict[str, Any]:
    """Return what the token records of a run say about spurious tokens, and about others for comparison.

    `raised` is the mean change of ln p from the rollout to the last pass over it. `before` and `after` are how often an
    improbable token (p < 0.1) with the same id was sampled in so many steps before the step and after it.
    """
    kinds: dict[str, list[Any]] = {name: [] for name in ("spurious", "rare, A < 0", "other, A > 0", "other, A < 0")}
    uses: list[Any] = []
    for step in open_run(folder):
        names = ("token", "old_logp", "new_logp", "entropy", "sum_p2", "advantage")
        token, old_logp, new_logp, entropy, sum_p2, advantage = (step.tokens[name] for name in names)
        p = np.exp(old_logp)
        norm = np.abs(advantage) * np.sqrt(np.maximum(1 - 2 * p + sum_p2, 0))
        table = np.stack([token, p, entropy, new_logp - old_logp, norm, norm**2], axis=1)
        candidates = entropy[(p < tau_p) & (advantage > 0)]
        threshold = np.quantile(candidates, quantile) if len(candidates) else 0.0
        spurious = (p < tau_p) & (entropy < threshold)
        masks = (
            spurious & (advantage > 0),
            spurious & (advantage < 0),
            ~spurious & (advantage > 0),
            ~spurious & (advantage < 0),
        )
        for name, mask in zip(kinds, masks, strict=True):
            kinds[name].append(table[mask])
        uses.append(np.bincount(token[p < 0.1], minlength=len(NUMBERS) + len(WORDS) + 2))
    counts, sums = np.stack(uses), sum(tables.sum(0) for kind in kinds.values() for tables in kind)
    out: dict[str, Any] = {"steps": len(uses), "tokens": sum(len(tables) for kind in kinds.values() for tables in kind)}
    for name, tables in kinds.items():
        if not len(every := np.concatenate(tables)):
            continue
        out[name] = {
            "count": len(every),
            "median p": float(np.median(every[:, 1])),
            "median entropy": float(np.median(every[:, 2])),
            "raised": float(every[:, 3].mean()),
            "share of norms": float(every[:, 4].sum() / sums[4]),
            "share of squared norms": float(every[:, 5].sum() / sums[5]),
        }
        events = [(at, int(row[0])) for at, table in enumerate(tables) for row in table]
        events = [(at, token) for at, token in events if window <= at < len(uses) - window]
        if events and name in ("spurious", "rare, A < 0"):
            out[name]["before"] = float(np.mean([counts[at - window : at, token].sum() for at, token in events]))
            out[name]["after"] = float(np.mean([counts[at + 1 : at + 1 + window, token].sum() for at, token in events]))
    return out
