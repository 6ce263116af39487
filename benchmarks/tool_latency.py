"""Steps with a tool that takes a while beside steps with one that answers at once: tokens per second, in turns.

`tool_latency.py --model runs/smollm2-tools` takes a model that calls its tool. Every call of a tool sleeps for the time
in question before it is run, in its own thread, as one over a network would.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from result_file import about, save
from trimtab.agents import ToolSet
from trimtab.trainer.config import load
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, build_trainer


class SlowTools:
    """Delays every call of a tool set by `seconds`."""

    def __init__(self, tools: ToolSet) -> None:
        self.seconds = 0.0
        self._call = tools.call_function
        tools.call_function = self  # type: ignore[method-assign]

    def __call__(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """Sleep, then call."""
        time.sleep(self.seconds)
        return self._call(tool, arguments, timeout)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-tools")
    parser.add_argument("--model", required=True, help="a run, a folder or a name")
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 0.05], help="seconds; the first is compared with"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], help="of the recipe")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # So many workers that no call waits for another; the weights hardly move, so that all rounds do the same work.
    settings = [f"model.path={args.model}", "tools.workers=512", "warm_start.steps=0", "update.lr=1e-9", *args.set]
    trainer, progress = build_trainer(load(args.recipe, settings)), RunProgress()
    assert trainer.tool_use is not None
    with closing(trainer.tool_use):
        slow = SlowTools(trainer.tool_use.tools)
        train_step(trainer, progress)  # compiles kernels, captures graphs
        steps: dict[float, list[dict[str, float]]] = {delay: [] for delay in args.delays}
        for _ in range(args.rounds):
            for slow.seconds in args.delays:
                steps[slow.seconds].append(dict(train_step(trainer, progress).metrics))
    speed = {delay: median(map(tokens_per_second, found)) for delay, found in steps.items()}
    first = speed[args.delays[0]]
    kept = (
        "conversation/called_share",
        "conversation/turns_mean",
        "time/rollout",
        "time/update",
        "time/tools_wait_share",
    )
    result = about("steps with slow tools", trainer.policy.device) | {
        "recipe": args.recipe,
        "settings": args.set,
        "rows": [
            {
                "delay_seconds": delay,
                "tokens_per_second": round(speed[delay], 1),
                "of_the_first": round(speed[delay] / first, 4),
                "calls": median(step["tools/calls"] for step in found),
                **{key: round(median(step[key] for step in found), 4) for key in kept},
            }
            for delay, found in steps.items()
        ],
    }
    save(result, args.out)
    for row in result["rows"]:
        print(row)


def tokens_per_second(step: Mapping[str, float]) -> float:
    """Sampled tokens of a step over its seconds."""
    return step["tokens/count"] / (step["time/rollout"] + step["time/update"])


if __name__ == "__main__":
    main()
