"""The columns of the flight recorder: what each means, its type, and how it is put on the disk.

A recorded step has two tables. `tokens` has one row per response token, in the order in which the update saw them;
`responses` one row per response, whose `tokens` says how many of those rows are its own. Whatever a plan is made from
is the exact float32 that the run had, so a plan can be made again bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1  # rises when a column changes its name or meaning; readers refuse what is newer than they are

Encoding = Literal["split", "dictionary", "delta", "plain"]
Presence = Literal["always", "where given", "where it differs"]


@dataclass(frozen=True)
class Column:
    """A column: its name, Arrow type and meaning, when it is there, and its encoding in parquet.

    `split` (bytes of a float apart, so that exponents compress) is for measured floats, which hardly repeat;
    `dictionary` for values that are the same over long runs; `delta` for counters.
    """

    name: str
    type: str
    meaning: str
    presence: Presence = "always"
    encoding: Encoding = "plain"


TOKENS: tuple[Column, ...] = (
    Column("response", "int32", "which response of the step, from 0: the row of `responses`", encoding="delta"),
    Column("token", "int32", "the token's id; its text is in the vocabulary", encoding="dictionary"),
    Column("old_logp", "float32", "log-probability under the policy that the step began with", encoding="split"),
    Column("new_logp", "float32", "log-probability in the update's own forward pass", "where given", "split"),
    Column("sampler_logp", "float32", "log-probability that the sampler drew it with", "where given", "split"),
    Column("current_logp", "float32", 'what tokens were judged by (`token_stats = "current"`)', "where given", "split"),
    Column("ref_logp", "float32", "log-probability under the reference model", "where given", "split"),
    Column("proxy_logp", "float32", "log-probability under Lp-Reg's proxy", "where given", "split"),
    Column("entropy", "float32", "entropy of the next-token distribution (nats)", "where given", "split"),
    Column("sum_p2", "float32", "sum of p^2 over the vocabulary", "where given", "split"),
    Column("sum_p2_logp", "float32", "sum of p^2 ln p over the vocabulary", "where given", "split"),
    Column("advantage", "float32", "advantage as the batch came", encoding="dictionary"),
    Column("planned_advantage", "float32", "advantage as planned", "where it differs", "split"),
    Column("weight", "float32", "the plan's weight on the surrogate; 0: silenced or dropped", encoding="dictionary"),
    Column("scale", "float32", "normaliser and aggregation, folded into one factor", encoding="dictionary"),
    Column("clip_low", "float32", "how far below 1 the ratio may go", encoding="dictionary"),
    Column("clip_high", "float32", "how far above 1 the ratio may go", encoding="dictionary"),
    Column("penalty", "float32", "coefficient of a rule's penalty", "where given", "dictionary"),
    Column("clipped", "bool", "whether a clip cut its gradient", "where given"),
    Column("reason", "int16", "why it was treated so: bits of `trimtab.Reason`", encoding="dictionary"),
    Column("segment", "int32", "subsentence of the response, from 0", "where given", "dictionary"),
)

RESPONSES: tuple[Column, ...] = (
    Column("step", "int32", "the step, as in metrics.jsonl", encoding="delta"),
    Column("response", "int32", "which response of the step, from 0", encoding="delta"),
    Column("update", "int32", "which update of the step trained on it, from 0", encoding="delta"),
    Column("tokens", "int32", "how many tokens it has", encoding="delta"),
    Column("group", "int64", "its prompt's number: responses of one group share it", encoding="delta"),
    Column("sample", "int32", "which response to the prompt it is", encoding="delta"),
    Column("reward", "float32", "its reward", encoding="dictionary"),
    Column("verdict", "string", "the verdict's kind: correct, wrong, no_answer, ...", encoding="dictionary"),
    Column("extracted", "string", "the answer found in it; empty where none was", encoding="dictionary"),
    Column("finished", "bool", "whether it ended by itself; else it was cut off"),
    Column("prompt", "string", "the prompt as the model read it", encoding="dictionary"),
    Column("answer", "string", "the right answer", encoding="dictionary"),
    Column("source", "string", "the task it is of", encoding="dictionary"),
)

VOCABULARY: tuple[Column, ...] = (
    Column("text", "binary", "the bytes of the token with this row's number as id; a special token's name"),
    Column("special", "bool", "whether it is a special token, which is no part of a text"),
)

TABLES: dict[str, tuple[Column, ...]] = {"tokens": TOKENS, "responses": RESPONSES, "vocabulary": VOCABULARY}


def arrow_schema(table: str, names: Iterable[str] | None = None) -> pa.Schema:
    """The Arrow schema of a table, or of those of its columns that are there. No column has nulls."""
    import pyarrow as pa

    wanted = None if names is None else set(names)
    types = {"bool": pa.bool_()}
    return pa.schema(
        [
            pa.field(column.name, types.get(column.type) or pa.type_for_alias(column.type), nullable=False)
            for column in TABLES[table]
            if wanted is None or column.name in wanted
        ]
    )


def required(table: str) -> list[str]:
    """The columns that are always there."""
    return [column.name for column in TABLES[table] if column.presence == "always"]
