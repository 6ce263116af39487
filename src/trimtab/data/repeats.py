"""Problems that occur more than once: rows of the training data that repeat others, and held-out ones in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.data.problems import FixedTask, Problem, Task, derive_seed
from trimtab.data.registry import OwnTask
from trimtab.text import shown

MOST_NAMED = 5  # of each kind of repeat, in a message


@dataclass(frozen=True)
class Repeats:
    """What occurs more than once: training problems that repeat an earlier one, and held-out ones that are trained on.

    `held_out` is the number of held-out problems that were looked at.
    """

    again: Sequence[Problem] = ()
    seen: Sequence[Problem] = ()
    held_out: int = 0

    def describe(self) -> list[str]:
        """Return a sentence for each kind of repeat; none if there is nothing to say."""
        lines = []
        if self.again:
            lines.append(
                f"{_count(self.again, 'training problem')} the prompt of an earlier one ({_named(self.again)}): remove "
                "them, unless they are to be seen more often"
            )
        if self.seen:
            lines.append(
                f"{_count(self.seen, f'of {self.held_out:,} held-out problem')} the prompt of one that is trained on "
                f"({_named(self.seen)}): the held-out accuracy then also shows what was memorised; remove them from "
                "one of the files"
            )
        return lines


def find_repeats(task: Task, worked: Sequence[Problem], test: Sequence[Problem], whole: bool) -> Repeats:
    """Find repeats in a task, and its problems and those of a warm start's file among the held-out ones.

    Problems with the same prompt are the same; if `whole`, only those with the same answer and extra columns too.
    Generated problems need no look: their splits never share one.
    """
    trained: set[int] = set()
    again = []
    for problem in problems_in_memory(task):
        key = _key(problem, whole)
        if key in trained:
            again.append(problem)
        trained.add(key)
    trained |= {_key(problem, whole) for problem in worked}
    return Repeats(again, [problem for problem in test if _key(problem, whole) in trained], len(test))


def problems_in_memory(task: Task) -> Sequence[Problem]:
    """Return the problems of a task that holds all of them; of one that makes them as they are asked for, none."""
    if isinstance(task, FixedTask):
        return task.problems
    listed = isinstance(task, OwnTask) and isinstance(task.problems, list | tuple)
    return [task[number] for number in range(len(task))] if listed else ()


def _key(problem: Problem, whole: bool) -> int:
    # Spaces and line ends differ between two files of the same problems. A hash, for prompts may be long and many.
    words = [" ".join(message["content"].split()) for message in problem.prompt]
    return derive_seed(*words, *((problem.answer, sorted(problem.extra.items())) if whole else ()))


def _count(problems: Sequence[Problem], what: str) -> str:
    return f"{len(problems):,} {what} repeats" if len(problems) == 1 else f"{len(problems):,} {what}s repeat"


def _named(problems: Iterable[Problem]) -> str:
    names = [problem.location or shown(problem.prompt[-1]["content"], 40) for problem in problems]
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return "; ".join(names[:MOST_NAMED]) + more
