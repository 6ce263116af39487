"""What STAPO silenced in a run: how many tokens, of which kind, and examples, read from the run's token records.

`trimtab train smollm2-zero --set record.group_share=1 --out RUN`, then `silenced_tokens.py RUN... --out FILE`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from result_file import about
from trimtab import Reason
from trimtab.files import write_atomically
from trimtab.record import open_run
from trimtab.trainer.config import load

EXAMPLES = 24
MOST = 20  # of the tokens silenced most often
BEFORE, AFTER = 60, 30  # characters around an example


def kind_of(piece: str) -> str:
    """Say what a token is, judged by its text."""
    text = piece.strip()
    if not text:
        return "space or new line"
    if piece.startswith("<|"):
        return "special token"
    if text.isdigit():
        return "number"
    if not any(letter.isalnum() for letter in text):
        return "punctuation or sign"
    return "word or part of one" if piece[:1].isspace() else "inside a word, or the first of a line"


def silenced_in(folder: Path) -> dict[str, Any]:
    """Return the figures of one run."""
    config, tokens = load(folder / "config.toml"), 0
    found: list[dict[str, Any]] = []
    for step in open_run(folder):
        columns, offsets = step.tokens, step.offsets
        tokens += len(columns["reason"])
        rows = np.flatnonzero(columns["reason"] & int(Reason.SILENCED))
        for row in rows.tolist():
            response = int(np.searchsorted(offsets, row, side="right")) - 1
            pieces = step.pieces(response)
            at = row - offsets[response]
            found.append(
                {
                    "step": step.number,
                    "before": "".join(pieces[:at])[-BEFORE:],
                    "token": pieces[at],
                    "after": "".join(pieces[at + 1 :])[:AFTER],
                    "probability": round(float(np.exp(columns["old_logp"][row])), 6),
                    "entropy": round(float(columns["entropy"][row]), 3),
                    "advantage": round(float(columns["advantage"][row]), 2),
                }
            )
    every = max(1, len(found) // EXAMPLES)
    return {
        "objective": config.objective["name"],
        "lr": config.update.lr,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "tokens": tokens,
        "silenced": len(found),
        "share": len(found) / tokens if tokens else None,
        "by_kind": dict(Counter(kind_of(each["token"]) for each in found).most_common()),
        "most_often": dict(Counter(each["token"] for each in found).most_common(MOST)),
        "examples": found[::every][:EXAMPLES],
    }


def main() -> None:
    """Write the figures of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = [silenced_in(run) for run in args.runs]
    result = {**about("what STAPO silenced, from token records", device), "runs": runs}
    write_atomically(args.out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
