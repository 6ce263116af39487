"""What the endpoint of agents costs: requests per second and server time for each, beside a bare call of the sampler.

`endpoint.py --out FILE` samples with the native sampler from a demo model. Agents are in a process of their own, each
with one rollout after another of `--turns` requests. Their client is either a bare socket, so that it does not take the
processor from the server, or the openai package. Times per request are of the processor: the server's is that of its
thread, and the sampler's that of the thread that samples. Requests per second depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

MAX_TOKENS = 24
CONTEXT = 512


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rollouts", type=int, default=256, help="in all; a single agent makes a quarter of them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clients", nargs="+", default=["socket", "openai"], choices=["socket", "openai"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import torch

    from result_file import about, save

    torch.set_num_threads(1)
    sampler = Measured(*_demo())
    result: dict[str, Any] = about("the endpoint of agents, native sampler, demo model", torch.device("cpu"), "uvicorn")
    result["runs"] = []
    for agents in args.agents:
        rollouts = args.rollouts if agents > 1 else args.rollouts // 4
        bare = sampler.bare(agents, rollouts, args.turns)
        for kind in args.clients:
            figures = sampler.through_endpoint(kind, agents, rollouts, args.turns)
            result["runs"].append({"agents": agents, "client": kind, **figures, "bare": bare})
            print(json.dumps(result["runs"][-1]))
    save(result, args.out)


def _demo() -> tuple[Any, Any]:
    from trimtab.trainer.model import demo_model, demo_tokenizer

    return demo_model(0), demo_tokenizer()


class Measured:
    """The native sampler on a model; counts the rows of each forward pass."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from trimtab.trainer.sampling import NativeSampler

        self.tokenizer, self.rows = tokenizer, list[int]()
        self.sampler = NativeSampler(model, frozenset({tokenizer.eos_token_id}), tokenizer.pad_token_id, nullcontext)
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        self.rows.append(len(keywords["input_ids"]))

    def bare(self, agents: int, rollouts: int, turns: int) -> dict[str, float]:
        """Sample as many answers, to prompts of the same lengths on average, without a server: `agents` at a time."""
        from trimtab.data import PromptTokens, SamplingOptions

        # A later turn's prompt holds the ones before.
        prompts = [self.tokenizer.encode(question(n)) * (2 * (n % turns) + 1) for n in range(rollouts * turns)]
        options = SamplingOptions(1, MAX_TOKENS, batch_size=agents)
        begun, before = time.perf_counter(), time.thread_time()
        tokens = 0
        for first in range(0, len(prompts), agents):
            batch = [PromptTokens(ids, first + k) for k, ids in enumerate(prompts[first : first + agents])]
            tokens += sum(len(group[0].tokens) for group in self.sampler.sample(batch, 0, options))
        seconds, cpu = time.perf_counter() - begun, time.thread_time() - before
        return {
            "requests_per_second": len(prompts) / seconds,
            "tokens_per_second": tokens / seconds,
            "sampler_ms_per_request": 1e3 * cpu / len(prompts),
        }

    def through_endpoint(self, kind: str, agents: int, rollouts: int, turns: int) -> dict[str, float]:
        """Let agents ask through the endpoint."""
        from trimtab.agents import ChatTokens, Endpoint, EndpointLimits
        from trimtab.data import SamplingOptions

        with Endpoint(ChatTokens(self.tokenizer), EndpointLimits(CONTEXT)) as endpoint:
            sessions = [endpoint.open(number, turns * MAX_TOKENS) for number in range(rollouts)]
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            work = (kind, endpoint.url, [session.api_key for session in sessions], agents, turns, theirs)
            process = multiprocessing.get_context("spawn").Process(target=run_agents, args=work)
            process.start()
            ours.recv()  # it has imported what it needs
            clock = time.pthread_getcpuclockid(endpoint.thread_ident)
            before, sampler_before, self.rows = time.clock_gettime(clock), time.thread_time(), []
            done: list[float] = []

            def wait() -> None:
                done.append(ours.recv())
                endpoint.finish()

            waiting = threading.Thread(target=wait)
            waiting.start()
            ours.send(None)
            self.sampler.serve(endpoint.requests, SamplingOptions(1, 1, batch_size=agents))
            sampler_cpu = time.thread_time() - sampler_before
            waiting.join()
            cpu = time.clock_gettime(clock) - before
            process.join()
            sealed = [session.seal() for session in sessions]
        requests = sum(each.stats.requests for each in sealed)
        tokens = sum(each.stats.sampled_tokens for each in sealed)
        assert requests == rollouts * turns
        return {
            "requests_per_second": requests / done[0],
            "tokens_per_second": tokens / done[0],
            "server_ms_per_request": 1e3 * cpu / requests,
            "sampler_ms_per_request": 1e3 * sampler_cpu / requests,
            "batch_filled": fmean(self.rows) / agents,
            "merged_share": sum(each.stats.merged for each in sealed) / requests,
        }


def question(number: int) -> str:
    """Return the words of a question."""
    return f"{number % 10}+{number // 10 % 10}="


def run_agents(kind: str, url: str, keys: Sequence[str], agents: int, turns: int, pipe: Connection) -> None:
    """Run all rollouts, so many at a time, and tell how many seconds they took."""
    ask = _ask_openai if kind == "openai" else _ask_socket
    if kind == "openai":
        import openai  # noqa: F401
    pipe.send("ready")
    pipe.recv()
    begun = time.perf_counter()
    asyncio.run(_run_all(ask, url, keys, agents, turns))
    pipe.send(time.perf_counter() - begun)


async def _run_all(ask: Any, url: str, keys: Sequence[str], agents: int, turns: int) -> None:
    waiting = list(enumerate(keys))[::-1]

    async def agent() -> None:
        while waiting:
            number, key = waiting.pop()
            await ask(url, key, number, turns)

    await asyncio.gather(*(agent() for _ in range(agents)))


async def _ask_openai(url: str, key: str, number: int, turns: int) -> None:
    from openai import AsyncOpenAI

    messages: list[Any] = []
    client = _shared_client(url).with_options(api_key=key)
    assert isinstance(client, AsyncOpenAI)
    for turn in range(turns):
        messages.append({"role": "user", "content": question(number + turn)})
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})


_clients: dict[str, Any] = {}


def _shared_client(url: str) -> Any:
    from openai import AsyncOpenAI

    return _clients.setdefault(url, AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600))


async def _ask_socket(url: str, key: str, number: int, turns: int) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages: list[Any] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": question(number + turn)})
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        head += f"x-stainless-retry-count: 0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    writer.close()


if __name__ == "__main__":
    main()
