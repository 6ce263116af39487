"""A program as an agent: it asks three times, and its answer is the one that came most often.

It reads the problem as JSON, and the openai package finds the run in OPENAI_BASE_URL and OPENAI_API_KEY. The last line
that it prints is graded by the task's rule. Train it in this folder: `trimtab train votes.toml`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from openai import OpenAI


def main() -> None:
    """Answer the problem on standard input."""
    problem = json.load(sys.stdin)
    client = OpenAI()
    votes: Counter[str] = Counter()
    for _ in range(3):  # three branches of one rollout: none goes on from another
        reply = client.chat.completions.create(model="policy", messages=problem["prompt"], max_tokens=6)
        votes[(reply.choices[0].message.content or "").strip()] += 1
    print(votes.most_common(1)[0][0])


if __name__ == "__main__":
    main()
