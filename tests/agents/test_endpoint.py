"""The endpoint as agents meet it: over the openai package and over curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any

import openai
import pytest

from helpers.agents.asking import DEMO, TOOLS, USER, ask, client, serving
from helpers.agents.tokenizers_of_models import CHATML, hermes, small_tokenizer
from trimtab.agents import Endpoint, Session
from trimtab.data import Request


def test_an_agent_of_several_turns_streamed_and_not() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100, sample=3)
        connection = client(endpoint, session)
        reply = ask(connection, logprobs=True)
        [choice] = reply.choices
        assert (choice.message.content, choice.finish_reason, reply.model) == ("7", "stop", "policy")
        usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
        assert usage == (4, 2, 6)
        assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.5]
        messages = [*USER, choice.message, {"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
        chunks = list(ask(connection, messages, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (text, chunks[-2].choices[0].finish_reason) == ("7", "stop")
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 4 + 2 + 5 + 2
        assert session.requests == 2
        session.reward(0, 1.0)
        sealed = session.seal()
        [branch] = sealed.branches
        assert (sealed.last_message, branch.reward, branch.response.sample) == ("7", 1.0, 3)
        assert branch.response.observed == ((2, 7),) and sealed.stats.merged_share == 0.5
        assert (sealed.stats.requests, sealed.stats.turns, sealed.stats.sampled_tokens) == (2, 2, 4)


def test_the_async_client_and_three_votes_at_once() -> None:
    with serving() as (endpoint, sampler):
        session = endpoint.open(1, 100)
        sampler.free.clear()

        async def vote() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=session.api_key, max_retries=0) as connection:
                votes = [asyncio.create_task(ask(connection, max_tokens=6)) for _ in range(3)]
                await asyncio.get_running_loop().run_in_executor(None, sampler.wait_for, 3)
                sampler.free.set()
                return await asyncio.gather(*votes)

        replies = asyncio.run(vote())
        assert [reply.choices[0].message.content for reply in replies] == ["7"] * 3
        assert len({request.key for request in sampler.requests}) == 3
        assert len(session.seal().branches) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_replied_to(stream: bool) -> None:
    tokenizer = small_tokenizer(CHATML)
    answers = iter([f"Well.\n{hermes('echo', text='a')}\n{hermes('echo', text='b')}", "<think>\nhm\n</think>\n\ndone"])
    with serving(lambda request: next(answers), tokenizer) as (endpoint, sampler):
        session = endpoint.open(1, 1_000)
        connection = client(endpoint, session)
        if stream:
            with connection.chat.completions.stream(model="policy", messages=USER, tools=TOOLS) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = ask(connection, tools=TOOLS).choices[0]
        calls = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
        assert [(c.function.name, json.loads(c.function.arguments)["text"]) for c in calls] == [
            ("echo", "a"),
            ("echo", "b"),
        ]
        assert len({call.id for call in calls}) == 2
        told = [{"role": "tool", "tool_call_id": call.id, "content": "said <|im_end|>"} for call in calls]
        made = [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls]
        messages = [*USER, {"role": "assistant", "content": "Well.", "tool_calls": made}, *told]
        reply = ask(connection, messages, tools=TOOLS)
        assert reply.choices[0].message.content == "done"
        assert reply.choices[0].message.reasoning_content == "hm"
        sealed = session.seal()
        [branch] = sealed.branches
        assert sealed.last_message == "<think>\nhm\n</think>\n\ndone"
        assert [message.role for message in branch.messages] == ["user", "assistant", "tool", "tool", "assistant"]
        ends = branch.response.tokens.tolist().count(tokenizer.eos_token_id)
        assert ends == 4 and "said <|im_end|>" in tokenizer.decode(branch.response.tokens)
        assert sampler.requests[1].follows is None and sampler.requests[1].prompt[: len(branch.prompt)] == branch.prompt


def test_without_tools_or_with_tool_choice_none_a_call_is_text() -> None:
    tokenizer = small_tokenizer(CHATML)
    with serving(lambda request: hermes("echo", text="a"), tokenizer) as (endpoint, _):
        connection = client(endpoint, endpoint.open(1, 10_000))
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = ask(connection, **options).choices[0].message
            assert message.tool_calls is None and "<tool_call>" in message.content


def test_what_the_run_imposes_is_counted_by_name() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)
        connection = client(endpoint, session)
        for _ in range(2):
            reply = connection.chat.completions.create(
                model="gpt-5", messages=USER, temperature=0.2, seed=3, top_p=1, user="me", presence_penalty=0
            )
            assert reply.model == "policy"
        ask(connection, tools=TOOLS, tool_choice="required")
        overridden = {"model": 2, "temperature": 2, "seed": 2, "tool_choice": 1}
        assert session.seal().stats.overridden == overridden


def test_stop_strings_end_an_answer() -> None:
    tokenizer = small_tokenizer(CHATML)
    with serving(lambda request: "one é Observation: two", tokenizer) as (endpoint, _):
        session = endpoint.open(1, 1_000)
        connection = client(endpoint, session)
        choice = ask(connection, stop=["Observation:", "never"]).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one é ", "stop")
        messages = [*USER, {"role": "assistant", "content": "one é"}, {"role": "user", "content": "go"}]
        assert ask(connection, messages).choices[0].message.content == "one é Observation: two"
        [branch] = session.seal().branches
        assert tokenizer.decode(branch.response.tokens).startswith("one é Observation:<|im_end|>\n<|im_start|>user\ngo")


def test_sixty_four_agents_at_once() -> None:
    def policy(request: Request) -> str:
        return str(DEMO.decode(list(request.prompt))).rstrip("=").rpartition(" ")[2][:3]

    async def solve(endpoint: Endpoint, session: Session, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=session.api_key, max_retries=0) as connection:
            messages: list[Any] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f" {turn}{number:02d}="})
                reply = await ask(connection, messages, stream=turn == 1)
                text = reply.choices[0].message.content if turn != 1 else ""
                if turn == 1:
                    async for chunk in reply:
                        text += chunk.choices[0].delta.content or ""
                assert text == f"{turn}{number:02d}"
                messages.append({"role": "assistant", "content": text})

    async def solve_all(endpoint: Endpoint, sessions: list[Session]) -> None:
        await asyncio.gather(*(solve(endpoint, session, number) for number, session in enumerate(sessions)))

    with serving(policy) as (endpoint, sampler):
        sessions = [endpoint.open(number, 1_000) for number in range(64)]
        asyncio.run(solve_all(endpoint, sessions))
        sealed = [session.seal() for session in sessions]
        assert all(len(each.branches) == 1 and each.stats.merged == 2 for each in sealed)
        assert sum(sampler.batches) == 192


def test_curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)

        def curl(body: Any, *more: str) -> str:
            headers = ["-H", f"Authorization: Bearer {session.api_key}", "-H", "Content-Type: application/json"]
            command = ["curl", "-sS", "--max-time", "60", f"{endpoint.url}/chat/completions", *headers, *more]
            given = json.dumps(body)
            return subprocess.run(
                [*command, "-d", "@-"], input=given, capture_output=True, text=True, check=True
            ).stdout

        reply = json.loads(curl({"messages": USER}))
        assert reply["choices"][0]["message"]["content"] == "7"
        events = curl({"messages": USER, "stream": True, "stream_options": {"include_usage": True}}, "-N").split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert [choice["delta"] for event in parsed for choice in event["choices"]] == [
            {"role": "assistant", "content": ""},
            {"content": "7"},
            {},
        ]
        assert parsed[-1]["usage"]["total_tokens"] == 6
        too_long = curl({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, "-w", "%{http_code}")
        assert too_long.endswith("413")
        assert session.seal().stats.branches == 2


def test_a_reward_needs_its_request() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)
        with pytest.raises(ValueError, match="there is no request 0"):
            session.reward(0, 1.0)
