"""Compare our grader with others: verdicts per second, and every answer on which they disagree.

The answers are the benchmarks' own truths (`--data` is a folder of parquet files in verl's schema) in common ways of
writing them, and as many wrong ones. Each grader gets the same responses: trimtab's rule `math`, math-verify called
directly, and, where their wheels are unpacked under `--peers` (`peers/trl`, `peers/verl`), TRL's and verl's own reward
functions. verl's modules are loaded by their files, because the package itself asks for Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from result_file import CPU, about, save
from trimtab.data import Problem, read_file
from trimtab.data.problems import user
from trimtab.grading import grade, grade_many
from trimtab.grading.extract import last_box

BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
ROUNDS = 5
EASY = 5_000  # answers of the speed measurement

Grader = Callable[[str, str], bool]
Case = tuple[str, str, str]  # a response, the truth, and how the response was made


def main() -> None:
    """Measure, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the benchmarks' parquet files")
    parser.add_argument("--peers", type=Path, help="a folder with the unpacked wheels of trl and verl")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rewards-cpu.json"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    cases = make_cases(arguments.data)
    graders, missing = find_graders(arguments.peers)
    what = "verdicts beside other graders: right, wrong, and how long they take"
    result = about(what, CPU, "math-verify", "sympy", "latex2sympy2_extended") | {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "note": "A shared machine: other work ran meanwhile, so seconds wander; ratios within the run say more.",
        "not_measured": missing,
        "easy_verdicts_per_second": easy_speed(cases),
        "cases": dict(Counter(made for _, _, made in cases)),
        "graders": {},
    }
    ours, seconds = grade_by_us(cases)
    result["graders"]["trimtab math"] = figures(cases, ours, seconds)
    for name, grader in graders.items():
        theirs, seconds = grade_by(grader, cases)
        result["graders"][name] = {**figures(cases, theirs, seconds), **disagreements(cases, ours, theirs)}
        print(name, {key: value for key, value in result["graders"][name].items() if key != "disagreements"})
    save(result, arguments.out)


def make_cases(data: Path) -> list[Case]:
    """Return every truth in several spellings, and another problem's truth and a near miss as wrong answers."""
    rng = random.Random(0)
    cases: list[Case] = []
    for name in BENCHMARKS:
        answers = [problem.answer for problem in read_file(str(data / f"{name}.parquet")).problems]
        plain = [bare(last_box(answer) or answer) for answer in answers]
        for answer, text in zip(answers, plain, strict=True):
            cases += [(rf"So the answer is $\boxed{{{form}}}$.", answer, made) for made, form in ways(text).items()]
            other = rng.choice(plain)
            if other != text:
                cases.append((rf"So the answer is $\boxed{{{other}}}$.", answer, "another's"))
            if (near := one_off(text)) is not None:
                cases.append((rf"So the answer is $\boxed{{{near}}}$.", answer, "one off"))
    return cases


def bare(answer: str) -> str:
    """Return an answer without the dollars around its formulas."""
    return re.sub(r"(?<!\\)\$", "", answer)


def ways(text: str) -> dict[str, str]:
    """Return common spellings of an answer."""
    forms = {"as it is": text, "dfrac": text.replace(r"\frac", r"\dfrac"), "spaced": re.sub(r"([,+=])", r" \1 ", text)}
    if re.fullmatch(r"-?\d+", text):
        forms |= {"decimal": f"{text}.0", "named": f"x = {text}", "grouped": f"{int(text):,}"}
    if fraction := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text):
        forms["slash"] = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    return forms


def one_off(text: str) -> str | None:
    """Return the answer with its last digit raised by one."""
    place = max((i for i, char in enumerate(text) if char in "012345678"), default=None)
    return None if place is None else text[:place] + str(int(text[place]) + 1) + text[place + 1 :]


def easy_speed(cases: Sequence[Case]) -> dict[str, float]:
    """Return verdicts per second, one at a time, on answers that are plain numbers: the median of several rounds."""
    plain = [
        case for case in cases if re.search(r"boxed\{-?[\d.,/]+\}", case[0]) and re.fullmatch(r"-?[\d.]+", case[1])
    ]
    easy = (plain * (EASY // len(plain) + 1))[:EASY]
    rates = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for response, answer, _ in easy:
            grade(response, answer)
        rates.append(len(easy) / (time.process_time() - start))
    return {"per_processor_second": round(median(rates)), "lowest_round": round(min(rates)), "answers": len(easy)}


def grade_by_us(cases: Sequence[Case]) -> tuple[list[bool], float]:
    """Return our verdicts, all in one batch; the worker is started before."""
    grade(r"\boxed{\sin^2 x}", r"1 - \cos^2 x")
    problems = [(response, Problem(user("?"), answer, "math", made)) for response, answer, made in cases]
    start = time.perf_counter()
    verdicts = grade_many(problems)
    return [verdict.kind == "correct" for verdict in verdicts], time.perf_counter() - start


def grade_by(grader: Grader, cases: Sequence[Case]) -> tuple[list[bool], float]:
    """Return another grader's verdicts, one after the other."""
    verdicts = []
    start = time.perf_counter()
    for response, answer, _ in cases:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                verdicts.append(grader(response, answer))
        except Exception:
            verdicts.append(False)
    return verdicts, time.perf_counter() - start


def figures(cases: Sequence[Case], verdicts: Sequence[bool], seconds: float) -> dict[str, Any]:
    """Return speed, and the share of each kind of case that was accepted."""
    accepted: Counter[str] = Counter(made for (_, _, made), right in zip(cases, verdicts, strict=True) if right)
    total = Counter(made for _, _, made in cases)
    shares = {made: round(accepted[made] / count, 4) for made, count in total.items()}
    return {"seconds": round(seconds, 2), "verdicts_per_second": round(len(cases) / seconds), "accepted": shares}


def disagreements(cases: Sequence[Case], ours: Sequence[bool], theirs: Sequence[bool]) -> dict[str, Any]:
    """Return the cases on which another grader disagrees with ours."""
    rows = [
        f"{'ours' if mine else 'theirs'} accepts, {made}: {last_box(response)} for {answer}"
        for (response, answer, made), mine, other in zip(cases, ours, theirs, strict=True)
        if mine != other
    ]
    return {"agreement": round(1 - len(rows) / len(cases), 4), "disagreements": rows}


def find_graders(peers: Path | None) -> tuple[dict[str, Grader], list[str]]:
    """Return the graders that can be run here, and why others cannot."""
    found: dict[str, Grader] = {"math-verify": math_verify_directly}
    missing = []
    if peers is None:
        return found, ["trl, verl: no --peers given"]
    try:
        sys.path.insert(0, str(peers / "trl"))
        from trl.rewards import accuracy_reward

        found["trl accuracy_reward"] = lambda response, answer: (
            accuracy_reward([[{"role": "assistant", "content": response}]], [wrapped(answer)])[0] == 1.0
        )
    except ImportError as error:
        missing.append(f"trl: {error}")
    for name in ("math_reward", "math_dapo"):
        try:
            module = load_file(peers / "verl/verl/utils/reward_score" / f"{name}.py")
            found |= verl_graders(name, module)
        except (ImportError, OSError) as error:
            missing.append(f"verl {name}: {error}")
    missing.append("verl prime_math, math_verify: they import the package verl, which needs Ray")
    return found, missing


def verl_graders(name: str, module: Any) -> dict[str, Grader]:
    """Return verl's reward functions of one file; `math_dapo` grades an answer line, or a box if it is strict."""
    if name == "math_reward":
        return {"verl math_reward": lambda response, answer: module.compute_score(response, unboxed(answer)) == 1.0}
    return {
        "verl math_dapo (answer line)": lambda response, answer: (
            module.compute_score(f"Answer: {last_box(response)}", unboxed(answer))["acc"] is True
        ),
        "verl math_dapo (strict box)": lambda response, answer: (
            module.compute_score(response, unboxed(answer), strict_box_verify=True)["acc"] is True
        ),
    }


def math_verify_directly(response: str, answer: str) -> bool:
    """Grade by math-verify as its documentation shows it."""
    from math_verify import parse, verify

    return bool(verify(parse(wrapped(answer)), parse(response)))


def wrapped(answer: str) -> str:
    r"""Return a truth marked as a formula, as math-verify and TRL want it."""
    return answer if "boxed" in answer or answer.startswith("$") else f"${answer}$"


def unboxed(answer: str) -> str:
    """Return a truth without box and dollars, as verl's string comparisons want it."""
    return bare(last_box(answer) or answer)


def load_file(path: Path) -> Any:
    """Import a module from its file, without its package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
