"""The errors of rules: collected while responses are graded, shown and kept by the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.grading.submission import Submission
from trimtab.grading.verdicts import Verdict
from trimtab.text import printable, shorten

MAX_ERRORS = 20  # of one step that are kept
MAX_EXCERPT = 200  # characters of a response that an error names


@dataclass
class RuleErrors:
    """The errors of rules since they were last taken: of equal ones the first, and how often there were such."""

    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def add(self, rule: str, verdict: Verdict, item: Submission) -> None:
        """Add a verdict that has an error, or that the rule failed to give."""
        if verdict.kind != "crashed" and not verdict.error:
            return
        error = verdict.error or f"the rule {rule} failed on the answer {shorten(item.answer)!r}"
        # By the last line: that is the exception, and its message may quote the response.
        key = rule, error.splitlines()[-1].partition(":")[0]
        if key in self.found:
            self.found[key]["count"] += 1
        elif len(self.found) < MAX_ERRORS:
            where = {"location": item.location, "answer": shorten(item.answer, MAX_EXCERPT)}
            text = {"response": shorten(item.response, MAX_EXCERPT), "error": error}
            self.found[key] = {"rule": rule, "count": 1, "kind": verdict.kind, **where, **text}

    @staticmethod
    def merged(parts: Iterable[RuleErrors]) -> RuleErrors:
        """Return the errors of several processes as those of one."""
        merged = RuleErrors()
        for key, record in (item for part in parts for item in part.found.items()):
            if key in merged.found:
                merged.found[key]["count"] += record["count"]
            elif len(merged.found) < MAX_ERRORS:
                merged.found[key] = record
        return merged

    def take(self, step: int) -> list[dict[str, Any]]:
        """Return the errors as records of a step, and forget them."""
        taken = [{"step": step, **record} for record in self.found.values()]
        self.found = {}
        return taken


def describe_error(record: Mapping[str, Any], path: object) -> str:
    """Return a message that shows an error of a rule in full."""
    where = f"{record['location']}, " if record["location"] else ""
    return (
        f"warning: step {record['step']}: the rule {record['rule']} failed on {record['count']} responses; the first: "
        f"{where}{json.dumps(record['response'])}\n{printable(record['error'])}\nFurther errors are in {path}"
    )


def crashed_diagnosis(share: float, steps: int, path: object) -> str:
    """Explain why a run ends whose rules fail on most responses of some steps; of 0 steps: on held-out problems."""
    when = "this step" if steps == 1 else f"each of the last {steps} steps"
    what = f"responses in {when}" if steps else "held-out problems"
    return f"the rules failed on {share:.0%} of the {what}: nothing can be learnt from that. See {path}"
