"""The columns of the flight recorder: name, type, meaning, and encoding on disk.

A recorded step has two tables. `tokens` has one row per response token, in the order of the updates' mini-batches;
`responses` has one row per response, whose `tokens` is how many rows of the first table belong to it. The inputs of a
plan are stored as the exact float32 values of the run, so a replay makes the same plan bit for bit.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1  # raised when a column changes its name or meaning; readers refuse a newer schema

Encoding = Literal["split", "dictionary", "delta", "plain"]
Presence = Literal["always", "where given", "where it differs"]


@dataclass(frozen=True)
class Column:
    """One column of a table: its Arrow type, what it means, when it is present, and its parquet encoding."""

    name: str
    type: str
    meaning: str
    presence: Presence = "always"
    # split: the bytes of a float apart, so that exponents compress, for measured floats, which hardly repeat;
    # dictionary: for values that stay the same over long stretches; delta: for counters.
    encoding: Encoding = "plain"


TOKENS: tuple[Column, ...] = (
    Column("response", "int32", "which response of the step, from 0: the row of `responses`", encoding="delta"),
    Column("token", "int32", "the token's id; its text is in the vocabulary", encoding="dictionary"),
    Column("old_logp", "float32", "log-probability under the policy that the step began with", encoding="split"),
    Column("new_logp", "float32", "log-probability in the update's own forward pass", "where given", "split"),
    Column("sampler_logp", "float32", "log-probability under the sampler that generated it", "where given", "split"),
    Column(
        "current_logp",
        "float32",
        'log-probability that rules read (`token_stats = "current"`, `rollout.max_lag`)',
        "where given",
        "split",
    ),
    Column("ref_logp", "float32", "log-probability under the reference model", "where given", "split"),
    Column("proxy_logp", "float32", "log-probability under Lp-Reg's proxy", "where given", "split"),
    Column("entropy", "float32", "entropy of the next-token distribution (nats)", "where given", "split"),
    Column("sum_p2", "float32", "sum of p^2 over the vocabulary", "where given", "split"),
    Column("sum_p2_logp", "float32", "sum of p^2 ln p over the vocabulary", "where given", "split"),
    Column("advantage", "float32", "advantage before the plan", encoding="dictionary"),
    Column("planned_advantage", "float32", "advantage in the plan", "where it differs", "split"),
    Column("weight", "float32", "the plan's weight on the surrogate; 0: silenced or dropped", encoding="dictionary"),
    Column("scale", "float32", "normaliser and aggregation, folded into one factor", encoding="dictionary"),
    Column("clip_low", "float32", "how far below 1 the ratio may go", encoding="dictionary"),
    Column("clip_high", "float32", "how far above 1 the ratio may go", encoding="dictionary"),
    Column("penalty", "float32", "coefficient of a rule's penalty", "where given", "dictionary"),
    Column(
        "entropy_coef",
        "float32",
        "coefficient of an entropy bonus whose gradient is that of the entropy",
        "where given",
        "dictionary",
    ),
    Column("clipped", "bool", "whether a clip cut its gradient", "where given"),
    Column("reason", "int16", "why it got its weight: bits of `trimtab.Reason`", encoding="dictionary"),
    Column(
        "version",
        "int32",
        "after how many steps the weights were that sampled it, with rollout.max_lag",
        "where given",
        "dictionary",
    ),
    Column("segment", "int32", "subsentence of the response, from 0", "where given", "dictionary"),
    Column(
        "kept",
        "int32",
        "how many tokens top-p and top-k kept at its position; entropy, moments and all log-probabilities are then of "
        "the distribution over these alone",
        "where given",
        "dictionary",
    ),
    Column(
        "tool_tokens",
        "int32",
        "tokens of a tool's output right before it, which are not trained on; their text is in `observations`",
        "where given",
        "dictionary",
    ),
)

# Columns of `tokens` that are copied from the attributes of the same name of a TokenBatch and of its Plan; the others
# are made by the recorder or come from the forward passes.
FROM_BATCH = (
    "token", "old_logp", "sampler_logp", "current_logp", "ref_logp", "proxy_logp", "entropy", "sum_p2", "sum_p2_logp",
    "advantage", "segment",
)  # fmt: skip
FROM_PLAN = ("weight", "scale", "clip_low", "clip_high", "penalty", "entropy_coef", "reason")

RESPONSES: tuple[Column, ...] = (
    Column("step", "int32", "the step, as in metrics.jsonl", encoding="delta"),
    Column("response", "int32", "which response of the step, from 0", encoding="delta"),
    Column(
        "update",
        "int32",
        "which update trained on it, from 0; of several passes the last",
        encoding="delta",
    ),
    Column("tokens", "int32", "number of its tokens", encoding="delta"),
    Column("group", "int64", "number of its prompt, shared by all samples of it", encoding="delta"),
    Column("sample", "int32", "which sample of its prompt", encoding="delta"),
    Column(
        "branch",
        "int32",
        "which branch of an agent's rollout, from 0: rows of one `group` and `sample` are the branches of one rollout, "
        "and the prompt of each is its own context",
        "where given",
        "delta",
    ),
    Column("reward", "float32", "reward of the response", encoding="dictionary"),
    Column(
        "rewards", "string", "of several rewards each by name, before its weight, as JSON", "where given", "dictionary"
    ),
    Column("verdict", "string", "the verdict's kind: correct, wrong, no_answer, ...", encoding="dictionary"),
    Column("extracted", "string", "the answer extracted from it; empty if none", encoding="dictionary"),
    Column("finished", "bool", "whether it ended with an end token; else it was cut off"),
    Column("prompt", "string", "the prompt as the model read it", encoding="dictionary"),
    Column("answer", "string", "the ground truth", encoding="dictionary"),
    Column("source", "string", "the task of its problem", encoding="dictionary"),
    Column(
        "observations",
        "string",
        "what tools replied, as the model read it: a JSON list of `after` (so many of its tokens came before), "
        "`tokens` (how many it has) and `text`, whose middle is left out where it is long",
        "where given",
    ),
    Column(
        "calls",
        "string",
        "its calls of tools: a JSON list of `turn` (which of its messages, from 0), `tool`, `arguments`, `outcome` "
        "and `seconds`",
        "where given",
    ),
    Column("ended", "string", "how the conversation ended: answer, void, turns, ...", "where given", "dictionary"),
)

VOCABULARY: tuple[Column, ...] = (
    Column("text", "binary", "bytes of the token whose id is the row number; the name of a special token"),
    Column("special", "bool", "whether it is a special token, which decoding to text leaves out"),
)

TABLES: dict[str, tuple[Column, ...]] = {"tokens": TOKENS, "responses": RESPONSES, "vocabulary": VOCABULARY}


def arrow_schema(table: str, names: Container[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of a table, or of the named columns of it. No column has nulls."""
    import pyarrow as pa

    columns = [column for column in TABLES[table] if names is None or column.name in names]
    return pa.schema([pa.field(c.name, pa.type_for_alias(c.type), nullable=False) for c in columns])


def required(table: str) -> list[str]:
    """Return the names of the columns that are always present."""
    return [column.name for column in TABLES[table] if column.presence == "always"]


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token id (the name of a special token), and whether it is special. Unknown ids are special."""

    text: Sequence[bytes]
    special: Sequence[bool]

    def __len__(self) -> int:
        return len(self.text)

    def is_special(self, token: int) -> bool:
        """Return whether a token is left out when text is decoded."""
        return not 0 <= token < len(self.special) or self.special[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Decode tokens to one string each, which joined are the whole text.

        A character that spans several tokens is in the string of the last one; invalid bytes become U+FFFD.
        """
        # The incremental decoder keeps the bytes of an unfinished character until a later token completes it.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._bytes(token)) for token in tokens]
        rest = decoder.decode(b"", final=True)
        return [*pieces[:-1], pieces[-1] + rest] if pieces else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special ones by name."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    @cached_property
    def text_bytes(self) -> dict[int, bytes]:
        """Return the bytes of every token that is not special; `segment_ids` takes this in place of a tokenizer."""
        return {n: text for n, (text, special) in enumerate(zip(self.text, self.special, strict=True)) if not special}

    def _bytes(self, token: int) -> bytes:
        # A model with a padded head can sample ids that its tokenizer does not have.
        return self.text[token] if 0 <= token < len(self.text) else f"<{token}>".encode()
