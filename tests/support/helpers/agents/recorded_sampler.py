"""A sampler whose answers are odd on purpose, and which keeps what it sampled: no two tokens have one log-prob."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from helpers.agents.fake_sampler import FakeSampler
from trimtab.data import Request, Response

WORDS = ["six", "seven", "Köln", "中文", "🙂", "e\u0301", "12*3", "\n", "  ", "{", "so:", "<b>", "I see."]
TOOLS = ("look", "count")


@dataclass(frozen=True)
class Sampled:
    """An answer, the context that it was sampled from, and how many tokens were asked for at most."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    finished: bool
    most: int


class OddAnswers:
    """A policy: its answer depends on the key of the request only."""

    def __init__(self, tokenizer: Any, end_tokens: list[int], call_format: str) -> None:
        self.tokenizer, self.end_tokens, self.call_format = tokenizer, end_tokens, call_format
        self._size = len(tokenizer)

    def __call__(self, request: Request) -> list[int]:
        """Return an answer with an end token."""
        chance = random.Random(request.key)
        kinds = [self._plain, self._by_letters, self._any_tokens, self._call, self._call, self._thought, self._same]
        return [*chance.choice(kinds)(chance), chance.choice([*self.end_tokens[:1] * 4, *self.end_tokens])]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _text(self, chance: random.Random) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(0, 5)))

    def _plain(self, chance: random.Random) -> list[int]:
        return self._encode(self._text(chance))

    def _same(self, chance: random.Random) -> list[int]:
        """One word in two tokenizations."""
        return self._encode("42 42") if chance.random() < 0.5 else [n for word in "42 42" for n in self._encode(word)]

    def _by_letters(self, chance: random.Random) -> list[int]:
        """Markup too: what was sampled in three tokens must not come back as one."""
        text = self._text(chance) + chance.choice(["", "<think>", "</think>", "<tool_call>", "<|im_end|>"])
        return [number for letter in text for number in self._encode(letter)]

    def _any_tokens(self, chance: random.Random) -> list[int]:
        numbers = [chance.randrange(self._size) for _ in range(chance.randint(1, 8))]
        return [number for number in numbers if number not in self.end_tokens]

    def _call(self, chance: random.Random) -> list[int]:
        return self._encode(self._calls(chance))

    def _calls(self, chance: random.Random) -> str:
        calls = []
        for _ in range(chance.choice([1, 1, 1, 2])):
            arguments = {
                "place": chance.choice(WORDS),
                "days": chance.randint(1, 9),
                "deep": {"b": [1.5, None], "a": ""},
            }
            names = chance.sample(list(arguments), 3)
            key = "parameters" if self.call_format == "llama" else "arguments"
            call = {"name": chance.choice(TOOLS), key: {name: arguments[name] for name in names}}
            calls.append(json.dumps(call, ensure_ascii=chance.random() < 0.5))
        if self.call_format == "llama":
            return "; ".join(calls)
        before = chance.choice(["", "", "First I look.\n"])
        return before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)

    def _thought(self, chance: random.Random) -> list[int]:
        thought = chance.choice(["\nhm, 6?\n", "\n\n", "", "\n12\n\n13"])
        closed = chance.choice(["</think>\n\n", "</think>", "</think>\n\n", ""])
        after = chance.choice([self._text, self._calls])(chance) if closed else ""
        return self._encode(f"<think>{thought}{closed}{after}")


@dataclass
class RecordedSampler(FakeSampler):
    """What was sampled so far; `found` says which answer a log-prob is of, and its index there."""

    records: list[Sampled] = field(default_factory=list)
    found: dict[float, tuple[Sampled, int]] = field(default_factory=dict)

    def response(self, request: Request) -> Response:
        """Return an answer whose log-probs are like none before."""
        prompt = tuple(request.prompt)
        given = super().response(request)
        # Exact as 32-bit numbers, so that they can be found again.
        logp = tuple(-(len(self.found) + index + 1) / 4096 for index in range(len(given.tokens)))
        record = Sampled(prompt, tuple(given.tokens.tolist()), logp, given.finished, request.max_new_tokens)
        self.records.append(record)
        self.found |= {value: (record, index) for index, value in enumerate(logp)}
        return Response(record.tokens, logp, given.finished)
