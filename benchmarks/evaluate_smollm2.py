"""Evaluate SmolLM2-135M on GSM8K and MATH500; write metrics with intervals, seconds and tokens per second.

`--data` is a folder with `gsm8k_test.jsonl` and `math500.parquet` (or `.jsonl` of the same schema, where pyarrow is
missing: `--convert FOLDER` writes those and does nothing else). The same command resumes a stopped evaluation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import typer

from trimtab.data.benchmarks import BENCHMARKS, find_file
from trimtab.data.files import read_rows
from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.launch import PlainProgress
from trimtab.experiments.evaluate.report import as_json, write
from trimtab.experiments.evaluate.run import evaluate

NAMES = ("gsm8k", "math500")


def convert(data: Path, to: Path) -> None:
    """Write the benchmarks' files as jsonl, with the columns that are read."""
    to.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        source = find_file(BENCHMARKS[name], data)
        columns = ("question", "answer") if name == "gsm8k" else ("prompt", "reward_model", "data_source", "extra_info")
        lines = [json.dumps({column: row[column] for column in columns}) for _, row in read_rows(str(source))]
        (to / f"{source.stem}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{len(lines)} problems in {to / source.stem}.jsonl")


def measure(options: EvalOptions) -> dict[str, Any]:
    """Evaluate and return the result with its speed."""
    result = evaluate(options, PlainProgress(typer.echo))
    write(result)
    what = "SmolLM2-135M-Instruct, the native sampler; 95 % intervals by problem"
    return {"what": what, **as_json(result)}


def main() -> None:
    """Evaluate, and print and store the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--convert", type=Path, help="write the data as jsonl into this folder, and stop")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--benchmarks", default=",".join(NAMES))
    parser.add_argument("--preset", default="train")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rule", default="math")
    parser.add_argument("--no-entropy", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/evaluate-smollm2"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.convert:
        convert(args.data, args.convert)
        return
    options = EvalOptions(
        model=args.model,
        data=args.data,
        preset=args.preset,
        problems=args.problems,
        samples=args.samples,
        benchmarks=args.benchmarks,
        max_new_tokens=args.max_new_tokens,
        batch=args.batch,
        precision=args.precision,
        rule=args.rule,
        entropy=not args.no_entropy,
        out=args.folder,
    )
    text = json.dumps(measure(options), indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
