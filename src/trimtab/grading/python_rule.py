"""Rules of the user's own: `python:MODULE:FUNCTION`, called in a worker within limits or in this process.

The function gets the response, the answer and the problem's `extra`, and returns a bool, a number, a kind of verdict
or a `Verdict`. `@trimtab.rule` says how it is called: with lists of many responses, and in which process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, overload

from trimtab.data import Sample
from trimtab.grading.verdicts import FACTS, Verdict, WorkerCall, facts, plain_result, verdict_or_crash
from trimtab.own_parts import PREFIX, OwnPartError, load_part, location, own_traceback
from trimtab.text import shown
from trimtab.workers import WorkerLimits, WorkerResult, redirected

LIMITS = WorkerLimits(seconds=10.0, cpu_seconds=5.0, memory=1 << 30)
BATCH_LIMITS = WorkerLimits(seconds=60.0, cpu_seconds=60.0, memory=1 << 30, result=1 << 22)
WORKER_BATCH = 64  # responses of a batched call in a worker: several run side by side
CALL_RULE = "trimtab.grading.python_rule:call_rule"

# A call for a worker, the rows of the responses that it grades, and what reads their verdicts from its result.
DeferredCall = tuple[WorkerCall, Sequence[int], Callable[[WorkerResult], Sequence[Verdict]]]
__all__ = ["PythonRule", "call_rule", "load_python_rule", "plain_result", "rule"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class RuleCall:
    """How a rule of the user's own is called; `seconds` are those of one call in a worker."""

    batched: bool = False
    in_process: bool = False
    seconds: float | None = None


@overload
def rule(function: _Function) -> _Function: ...
@overload
def rule(
    *, batched: bool = False, in_process: bool = False, seconds: float | None = None
) -> Callable[[_Function], _Function]: ...
def rule(
    function: _Function | None = None,
    *,
    batched: bool = False,
    in_process: bool = False,
    seconds: float | None = None,
) -> _Function | Callable[[_Function], _Function]:
    """Say how a rule of one's own is called.

    `batched`: with lists of responses, answers and extras; it returns a list. `in_process`: in the trainer's own
    process, fast, but without any limit on what the response makes it do. `seconds`: of one call, elsewhere.
    """
    if seconds is not None and not 0 < seconds <= 3600:
        raise ValueError(f"seconds={shown(seconds)} must be more than 0 and at most 3600")
    if seconds is not None and in_process:
        raise ValueError("seconds limits a call in a worker; a rule in the trainer's process has no limit")

    def mark(function: _Function) -> _Function:
        function.__trimtab_rule__ = RuleCall(batched, in_process, seconds)  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)


@dataclass(frozen=True)
class PythonRule:
    """A rule of the user's own, loaded and checked. `wanted` are the facts that its signature names."""

    name: str
    function: Callable[..., Any]
    call: RuleCall
    wanted: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> WorkerLimits:
        """What one call in a worker may take."""
        base, seconds = BATCH_LIMITS if self.call.batched else LIMITS, self.call.seconds
        return base if seconds is None else WorkerLimits(seconds, seconds, base.memory, base.result)

    def worker_calls(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[DeferredCall]:
        """Return the calls that grade these rows of a list in workers, the rows of each, and what reads its result."""
        size = WORKER_BATCH if self.call.batched else 1
        calls: list[DeferredCall] = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            graded = [samples[row] for row in some]
            arguments, keywords = self._arguments([_plain(sample) for sample in graded])
            call = WorkerCall(f"{CALL_RULE}@{self.name}", arguments, None, self.limits, keywords)
            calls.append((call, some, partial(self.verdicts, graded)))
        return calls

    def grade_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Grade in this process."""
        chunks = [samples] if self.call.batched else [[sample] for sample in samples]
        return [verdict for chunk in chunks for verdict in self._call_here(chunk)]

    def verdicts(self, samples: Sequence[Sample], result: WorkerResult) -> list[Verdict]:
        """Return the verdicts of one call in a worker."""
        seconds = result.seconds / len(samples)
        if result.outcome == "done":
            return [replace(verdict, seconds=seconds) for verdict in self._read(result.value, samples)]
        limits = f"more than {self.limits.seconds:g} s, {self.limits.cpu_seconds:g} s of the processor or its memory"
        costly = f"{limits}; @trimtab.rule(seconds=...) allows more" if result.outcome == "too_costly" else ""
        error = result.traceback or f"{self.name} for {samples[0].named}: {result.error or costly}"
        # Also if it ran out of time: a slow rule says nothing about the response.
        return [Verdict("crashed", seconds=seconds, error=error)] * len(samples)

    def _call_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        arguments, keywords = self._arguments(samples)
        try:
            with redirected():
                value = self.function(*arguments, **keywords)
        except Exception as error:
            return [Verdict("crashed", error=own_traceback(error))] * len(samples)
        return self._read(value, samples)

    def _arguments(self, samples: Sequence[Sample]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ("response", "answer", "extra", *self.wanted)
        given = [facts(sample) for sample in samples]
        columns = {name: [each[name] for each in given] for name in names}
        if not self.call.batched:
            columns = {name: values[0] for name, values in columns.items()}
        return tuple(columns.pop(name) for name in names[:3]), {**columns, **self.options}

    def _read(self, value: Any, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdicts that a call's result stands for, one per response; what stands for none has crashed."""
        values = [value]
        if self.call.batched:
            if hasattr(value, "tolist"):  # an array of NumPy or torch
                value = value.tolist()
            if not isinstance(value, list | tuple) or len(value) != len(samples):
                got = f"{len(value)} results" if isinstance(value, list | tuple) else shown(value)
                message = (
                    f"{self.name} returned {got} for {len(samples)} responses: a batched rule returns one for each"
                )
                return [Verdict("crashed", error=message)] * len(samples)
            values = list(value)
        return [
            verdict_or_crash(each, f"{self.name} for {f'row {row} of {len(samples)}, ' * self.call.batched}", sample)
            for row, (each, sample) in enumerate(zip(values, samples, strict=True), start=1)
        ]


def load_python_rule(name: str, options: Mapping[str, Any] | None = None) -> PythonRule:
    """Load and check a rule of the user's own; a mistake in it is an `OwnPartError`."""
    function = load_part(name)
    call = getattr(function, "__trimtab_rule__", RuleCall())
    if ":" not in name.removeprefix(PREFIX):  # registered in this process, of which workers know nothing
        call = RuleCall(call.batched, in_process=True)
    given = dict(options or {})
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return PythonRule(name, function, call, (), given)
    keyword_only = [key for key, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    wanted = tuple(key for key in keyword_only if key in FACTS and key not in given)
    _check_signature(name, function, wanted, given, keyword_only)
    return PythonRule(name, function, call, wanted, given)


def _check_signature(
    name: str, function: Callable[..., Any], wanted: Sequence[str], options: Mapping[str, Any], known: Sequence[str]
) -> None:
    where = f"{name} ({location(function)})" if location(function) else name
    signature = inspect.signature(function)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    unknown = [] if takes_any else [key for key in options if key not in known]
    if unknown:
        own = ", ".join(key for key in known if key not in FACTS) or "none"
        raise OwnPartError(f"{where} has no option {shown(unknown[0])}; its options, after a *, are: {own}")
    try:
        signature.bind("response", "answer", {}, **dict.fromkeys(wanted), **options)
    except TypeError as error:
        facts = ", ".join(FACTS)
        raise OwnPartError(
            f"{where} must take (response, answer, extra), and after a * any of {facts} or options of its own: {error}"
        ) from None


def call_rule(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a rule; this is what its worker does, which turns the result into JSON by this module's `plain_result`."""
    return function(*arguments, **keywords)


def _plain(sample: Sample) -> Sample:
    """Return a sample whose `extra` JSON can hold, since a call crosses a pipe."""
    try:
        extra = json.loads(json.dumps(dict(sample.problem.extra), default=str))
    except (TypeError, ValueError):
        extra = {}
    return replace(sample, problem=replace(sample.problem, extra=extra))
