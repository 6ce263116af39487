"""The batch format of trimtab: vectors over the response tokens of a batch, concatenated.

There is no padding and no mask inside. Convert with `TokenBatch.from_padded`, `pack` and `unpack`; tokens that the
policy did not sample (prompt, padding, tool output) are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from trimtab.objectives.lazy_torch import Tensor, torch


@dataclass(frozen=True, eq=False)
class Spans:
    """The span of each token (`index`), the `size` of each span, and the first span of each response (`offsets`)."""

    index: Tensor
    size: Tensor
    offsets: Sequence[int]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over each span."""
        if values.is_cpu and len(values) and torch.backends.mkl.is_available():
            return torch.mv(self._membership.to(values.dtype), values)
        # unsafe skips a check of the lengths that would make the host wait for a GPU.
        return torch.segment_reduce(values, "sum", lengths=self.size, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over each span (NaN for an empty one)."""
        return self.sum(values) / self.size

    def spread(self, per_span: Tensor) -> Tensor:
        """Return, for every token, the value of its span."""
        return per_span.index_select(0, self.index)

    def select(self, tokens: slice, first: int, last: int) -> Spans:
        """Return the spans of the responses `first` up to `last`, whose tokens are `tokens`."""
        low, high = self.offsets[first], self.offsets[last]
        return Spans(self.index[tokens] - low, self.size[low:high], [o - low for o in self.offsets[first : last + 1]])

    @cached_property
    def _membership(self) -> Tensor:
        """The sparse (spans, tokens) matrix of ones: a product with it sums over spans."""
        # On a CPU four times as fast as segment_reduce.
        tokens = len(self.index)
        ends = self.size.cumsum(0)
        rows = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        # torch warns that sparse CSR is in beta.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks)")
            columns, ones = torch.arange(tokens, dtype=torch.int32), torch.ones(tokens)
            shape = (len(self.size), tokens)
            return torch.sparse_csr_tensor(rows, columns, ones, size=shape, check_invariants=False)


# Log-probabilities are clamped here: low enough to mean p = 0, high enough that differences of two stay finite.
LOGP_FLOOR = -1e4

# What rounding may put above 0: log-probabilities of a certain token by a sampler in bf16, entropies below it.
ROUNDING = 0.1

LOGPS = ("old_logp", "current_logp", "sampler_logp", "ref_logp", "proxy_logp")
TOKEN_FLOATS = (*LOGPS, "advantage", "entropy", "sum_p2", "sum_p2_logp")
TOKEN_INTS = ("sequence", "token", "segment")
RESPONSE_INTS = ("group", "rollout")
RESPONSE_FIELDS = (*RESPONSE_INTS, "reward")


class NotFiniteError(ValueError):
    """A value of a batch is NaN or infinite; names the `field` and the `responses`."""

    def __init__(self, message: str, field: str, responses: list[int]) -> None:
        super().__init__(message)
        self.field = field
        self.responses = responses


@dataclass(frozen=True)
class Layout:
    """The positions of packed tokens in their padded form: `index` into the flattened `shape`."""

    index: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The response tokens of a batch; optional fields may be None.

    Per token: `old_logp` (the policy at the start of the step), `advantage`, `sequence` (which response,
    non-decreasing), `entropy` (nats, at the sampling temperature), `token` (ids), `segment` (ids; consecutive equal ids
    within a response are a segment), `sampler_logp`, `ref_logp`, `proxy_logp` (Lp-Reg's filtered policy), `sum_p2` and
    `sum_p2_logp` (sums over the vocabulary of p^2 and p^2 ln p). `current_logp` is the policy at this update: where it
    is given, rules judge tokens by it instead of by `old_logp`, and `entropy` must be the current policy's.
    Per response: `group` (responses to one prompt share it), `reward`, and `rollout` (ids): responses with one id are
    the branches of one run of an agent, which lies in one group, and means over responses are over rollouts instead. In
    several processes an id is the same rollout, or group, in all of them.
    """

    old_logp: Tensor
    advantage: Tensor
    sequence: Tensor
    entropy: Tensor | None = None
    token: Tensor | None = None
    segment: Tensor | None = None
    sampler_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    current_logp: Tensor | None = None
    proxy_logp: Tensor | None = None
    sum_p2: Tensor | None = None
    sum_p2_logp: Tensor | None = None
    group: Tensor | None = None
    reward: Tensor | None = None
    rollout: Tensor | None = None
    responses: int = -1
    layout: Layout | None = None

    def __post_init__(self) -> None:
        self._convert()
        self._check_lengths()
        self._check_values()

    @classmethod
    def from_padded(
        cls,
        mask: Tensor,
        *,
        old_logp: Tensor,
        advantage: Tensor,
        entropy: Tensor | None = None,
        token: Tensor | None = None,
        segment: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        current_logp: Tensor | None = None,
        sum_p2: Tensor | None = None,
        sum_p2_logp: Tensor | None = None,
        group: Tensor | None = None,
        reward: Tensor | None = None,
        proxy_logp: Tensor | None = None,
        rollout: Tensor | None = None,
    ) -> TokenBatch:
        """Build a batch from (responses, positions) tensors; `mask` is 1 where the policy sampled a token.

        `advantage` may also hold one value per response; `group`, `reward` and `rollout` always do.
        """
        mask = torch.as_tensor(mask)
        if mask.ndim != 2:
            raise ValueError(f"mask must be (responses, positions), got shape {tuple(mask.shape)}")
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("mask must hold 0 and 1 alone, 1 where the policy sampled a token; it takes no weights")
        rows, columns = mask.shape
        layout = Layout(mask.bool().reshape(-1).nonzero().squeeze(1), (rows, columns))
        adv = torch.as_tensor(advantage)
        if adv.ndim == 1 and len(adv) == rows:
            advantage = adv.unsqueeze(1).expand(rows, columns)
        per_token = {
            "old_logp": old_logp, "advantage": advantage, "entropy": entropy, "token": token, "segment": segment,
            "sampler_logp": sampler_logp, "ref_logp": ref_logp, "current_logp": current_logp, "proxy_logp": proxy_logp,
            "sum_p2": sum_p2, "sum_p2_logp": sum_p2_logp,
        }  # fmt: skip
        packed = {name: _pack(value, layout, name) for name, value in per_token.items() if value is not None}
        row = torch.div(layout.index, max(columns, 1), rounding_mode="floor")
        return cls(sequence=row, group=group, reward=reward, rollout=rollout, responses=rows, layout=layout, **packed)

    def pack(self, padded: Tensor) -> Tensor:
        """Pack a (responses, positions) tensor: return its response tokens in this batch's order; differentiable."""
        return _pack(padded, self._layout, "the padded tensor")

    def unpack(self, packed: Tensor, fill: float = 0.0) -> Tensor:
        """Invert `pack`: return (responses, positions), with `fill` where there is no response token."""
        if packed.ndim != 1 or len(packed) != self.tokens:
            raise ValueError(f"unpack takes one value per token ({self.tokens} here), got shape {tuple(packed.shape)}")
        rows, columns = self._layout.shape
        flat = torch.full((rows * columns,), fill, dtype=packed.dtype, device=packed.device)
        return flat.index_copy(0, self._layout.index, packed).reshape(rows, columns)

    @property
    def tokens(self) -> int:
        """The number of response tokens."""
        return len(self.old_logp)

    @property
    def judged_logp(self) -> Tensor:
        """The log-probability that rules judge tokens by: `current_logp` where given, else `old_logp`."""
        return self.old_logp if self.current_logp is None else self.current_logp

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each response."""
        return torch.bincount(self.sequence, minlength=self.responses)

    @property
    def starts(self) -> Tensor:
        """The position of the first token of each response."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    @cached_property
    def offsets(self) -> list[int]:
        """The start of each response and the end of the last, as integers on the host."""
        return [0, *torch.cumsum(self.lengths, 0).tolist()]

    @cached_property
    def rollout_numbers(self) -> Tensor:
        """The rollout of each response, counted from 0; without `rollout` every response is one."""
        if self.rollout is None:
            return torch.arange(self.responses, device=self.sequence.device)
        return number_rollouts(self.rollout, self.group)[0]

    @cached_property
    def spans(self) -> Spans:
        """The segments as spans: consecutive equal `segment` ids within a response, numbered through the batch."""
        # Two responses may end and begin with the same id, so a new response starts a segment too.
        assert self.segment is not None
        starts = torch.zeros_like(self.sequence, dtype=torch.bool)  # where a segment starts, except the very first
        starts[1:] = (self.segment[1:] != self.segment[:-1]) | (self.sequence[1:] != self.sequence[:-1])
        first = starts.nonzero().squeeze(1)
        if self.tokens:
            first = torch.cat([first.new_zeros(1), first])
        size = torch.diff(first, append=first.new_full((1,), self.tokens))
        ends = torch.searchsorted(first, torch.cumsum(self.lengths, 0)).tolist()
        return Spans(starts.cumsum(0), size, [0, *ends])

    @property
    def response_spans(self) -> Spans:
        """The responses as spans."""
        return Spans(self.sequence, self.lengths, range(self.responses + 1))

    def select(self, first: int, last: int) -> TokenBatch:
        """Return the batch of the responses `first` up to, not including, `last`."""
        span = slice(self.offsets[first], self.offsets[last])
        kept: dict[str, Any] = {}
        for name, value in self._tensors().items():
            kept[name] = value[first:last] if name in RESPONSE_FIELDS else value[span]
        kept["sequence"] = self.sequence[span] - first
        return replace(self, **kept, responses=last - first, layout=None)

    @cached_property
    def _layout(self) -> Layout:
        if self.layout is not None:
            return self.layout
        position = torch.arange(self.tokens, device=self.sequence.device) - self.starts[self.sequence]
        longest = int(self.lengths.max()) if self.responses else 0
        return Layout(self.sequence * longest + position, (self.responses, longest))

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _convert(self) -> None:
        """Detach every tensor and convert to one float type: float64 if `old_logp` has it, else float32."""
        # bfloat16 has three digits, too few for a ratio of probabilities; a list has no dtype.
        dtype = torch.float64 if getattr(self.old_logp, "dtype", None) == torch.float64 else torch.float32
        for name in (*TOKEN_FLOATS, *TOKEN_INTS, *RESPONSE_FIELDS):
            value = getattr(self, name)
            if value is None:
                continue
            # A graph in a planned batch would be kept alive by the plan and could leak into the loss.
            value = torch.as_tensor(value).detach()
            value = value.to(torch.int64 if name in (*TOKEN_INTS, *RESPONSE_INTS) else dtype)
            if name in LOGPS:
                value = value.clamp(min=LOGP_FLOOR)
            object.__setattr__(self, name, value)

    def _check_lengths(self) -> None:
        tokens = f"`old_logp` has {self.tokens} tokens: give one value per response token"
        self._check_shapes((*TOKEN_FLOATS, *TOKEN_INTS), self.tokens, tokens)
        if self.responses < 0:
            # Responses at the end may have no tokens: a field with one value per response counts them too.
            given = (getattr(self, name) for name in RESPONSE_FIELDS)
            per_response = next((value for value in given if value is not None), None)
            counted = int(self.sequence.max()) + 1 if self.tokens else 0
            object.__setattr__(self, "responses", counted if per_response is None else len(per_response))
        responses = f"there are {self.responses} responses: give one value per response"
        self._check_shapes(RESPONSE_FIELDS, self.responses, responses)

    def _check_shapes(self, names: Sequence[str], count: int, expected: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value.shape != (count,):
                raise ValueError(f"TokenBatch field `{name}` has shape {tuple(value.shape)}, but {expected}")

    def _check_values(self) -> None:
        """Raise if a value is not finite or `sequence` is out of order."""
        # All checks in one transfer, so that the host waits for a GPU once.
        names = [n for n in (*TOKEN_FLOATS, "reward") if getattr(self, n) is not None]
        # x * 0 is 0 for finite x and NaN for the rest: one cheap sum finds any of them.
        sums = [(getattr(self, name) * 0).sum().to(torch.float64) for name in names]
        first, last = self.sequence.new_zeros(1), self.sequence.new_full((1,), max(self.responses - 1, 0))
        unordered = (torch.diff(self.sequence, prepend=first, append=last) < 0).any()
        signed = [name for name in names if name in SIGNS] if self.tokens else []
        furthest = [(getattr(self, name) * SIGNS[name]).max().to(torch.float64) for name in signed]
        flags = torch.stack([*sums, *furthest, unordered.to(torch.float64)]).tolist()
        for name, total in zip(names, flags, strict=False):
            if total != 0:
                raise self._not_finite(name)
        for name, value in zip(signed, flags[len(names) :], strict=False):
            if value > ROUNDING:
                raise self._wrong_sign(name, SIGNS[name] * value)
        if flags[-1]:
            where = (
                f"TokenBatch field `sequence` must be non-decreasing response numbers from 0 to {self.responses - 1}"
            )
            raise ValueError(f"{where}: concatenate the tokens response by response")
        if self.rollout is not None:
            _ = self.rollout_numbers

    def _wrong_sign(self, name: str, value: float) -> ValueError:
        at = int((getattr(self, name) == value).nonzero()[0])
        row = int(self.sequence[at])
        where = f"TokenBatch field `{name}` is {value:g} at response {row}, token {at - self.offsets[row]}"
        if name == "entropy":
            return ValueError(f"{where}: an entropy is not below 0; is it sum p ln p, without the minus?")
        if name not in LOGPS:
            return ValueError(f"{where}: {FIELD_HELP[name]}")
        given = getattr(self, name)
        mistake = "the sign turned round (a loss, or -logp)"
        if bool((given >= 0).all()) and value <= 1:
            mistake = "probabilities, of which to take the logarithm"
        elif bool((given < 0).any()):
            mistake = "logits, without log_softmax"
        return ValueError(f"{where}: a log-probability is not above 0; are these {mistake}?")

    def _not_finite(self, name: str) -> NotFiniteError:
        value = getattr(self, name)
        bad = (~torch.isfinite(value)).nonzero().squeeze(1)
        first = int(bad[0])
        rows: list[int] = (bad if name == "reward" else self.sequence[bad].unique()).tolist()
        token = "" if name == "reward" else f", token {first - self.offsets[rows[0]]}"
        where = f"TokenBatch field `{name}` is {float(value[first])} at response {rows[0]}{token}"
        advice = "(a log-probability of -inf is fine, NaN and +inf never are), or leave that response out"
        return NotFiniteError(f"{where}: find the pass that made it {advice}", name, rows)


def number_rollouts(rollout: Tensor, group: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rollout of each response, counted from 0 in the order of their first responses, and these.

    Raise if `group` is given and the responses of a rollout are in different groups.
    """
    ids, number = torch.unique(rollout, return_inverse=True)
    response = torch.arange(len(rollout), device=rollout.device)
    first = response.new_zeros(len(ids)).scatter_reduce_(0, number, response, "amin", include_self=False)
    if group is not None and bool((divided := group != group[first][number]).any()):
        other = int(divided.nonzero()[0])
        one = int(first[number[other]])
        raise ValueError(
            f"responses {one} and {other} have the same rollout {int(rollout[other])}, but the groups "
            f"{int(group[one])} and {int(group[other])}: the branches of a rollout share a prompt; give each rollout "
            "an id of its own"
        )
    order = first.argsort()
    return order.argsort()[number], first[order]


def _pack(padded: Tensor, layout: Layout, name: str) -> Tensor:
    padded = torch.as_tensor(padded)
    if padded.shape != layout.shape:
        raise ValueError(f"`{name}` has shape {tuple(padded.shape)}, but the mask has {layout.shape}")
    return padded.reshape(-1).index_select(0, layout.index)


# Times which a value is not above 0, but for rounding.
SIGNS = {**dict.fromkeys(LOGPS, 1), "entropy": -1, "sum_p2": -1, "sum_p2_logp": 1}

# How to obtain an optional field.
FIELD_HELP = {
    "group": "give each response the number of its prompt",
    "sum_p2": "it is the sum of p^2 over the vocabulary, which is not below 0",
    "sum_p2_logp": "it is the sum of p^2 ln p over the vocabulary, which is not above 0",
    "entropy": "measure it in the pass that gives old_logp: -sum p ln p over the vocabulary",
    "segment": "make it from token ids with trimtab.segment_ids(ids, tokenizer), from padded ones with its `mask`",
    "sampler_logp": "keep the log-probabilities that the sampler drew its tokens with",
    "ref_logp": "score the tokens with the reference model",
    "current_logp": "score the mini-batch with the current policy before planning, and give its entropy too",
}
