"""A user's own agent in TRL: its rollouts are TRL's completions, and what was sampled is what is trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
from datasets import Dataset

from helpers.engines import trl_runs
from helpers.engines.trl_tools import Noted, chat_model, chat_tokenizer
from trimtab.engines.trl import agent_reward, agent_rollouts
from trimtab.own_parts import look_beside
from trimtab.record import open_run

AGENT = "python:helpers.engines.own_agent:"


def graded(last_message: list[str], **columns: Any) -> list[float]:
    """A reward of TRL's own for the last message."""
    assert len(columns["answer"]) == len(last_message)
    return [len(text) / 10 for text in last_message]


def trainer(folder: Path, name: str, objective: str = "stapo(tau_p=0.2)", branches: str = "all", **args: Any) -> Any:
    """A trainer of eight prompts whose completions are rollouts of an agent."""
    rollouts = agent_rollouts(AGENT + name, agent_concurrency=4, agent_timeout=60.0, agent_branches=branches)
    prompts = [[{"role": "user", "content": f"{n}?"}] for n in range(8)]
    return trl_runs.trainer(
        chat_model(),
        trl_runs.config(folder, **{"objective": objective, "max_steps": 1, **args}),
        Noted,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": list("01234567")}),
        processing_class=chat_tokenizer(),
        rollout_func=rollouts,
        reward_funcs=[agent_reward, graded],
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("agents")
    made = trainer(folder, "solve", record=str(folder / "r"), num_iterations=2, max_steps=2, max_completion_length=6)
    made.train()
    return made, folder / "r"


def test_the_tokens_of_a_rollout_are_a_row(run: tuple[Any, Path]) -> None:
    made, _ = run
    assert trl_runs.logged(made, "agent/requests_mean") == [2.0] and made.state.global_step == 2
    (batch,) = made.batches
    sampled = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    others = batch["completion_mask"].bool() & ~batch["tool_mask"].bool()
    assert (sampled.sum(1) <= 6).all() and (sampled.sum(1) >= 2).all()  # two answers of at most three tokens
    assert (others.sum(1) > 0).all()  # the second question stands between them
    text = made.processing_class.decode(batch["completion_ids"][0][others[0]])
    assert "1+1=" in text
    # The sampler's log-probabilities are those of the model that is trained: nothing is shifted.
    assert torch.allclose(batch["old_per_token_logps"][sampled], batch["sampling_per_token_logps"][sampled], atol=1e-4)


def test_records_have_what_the_agent_wrote_as_observations(run: tuple[Any, Path]) -> None:
    made, folder = run
    step = open_run(folder).step(1)
    marked = step.tokens["tool_tokens"]
    assert set(marked.tolist()) > {0} and len(marked) == int((made.batches[0]["tool_mask"] * 1).sum())


def test_an_agents_rollouts_train_and_repeat(run: tuple[Any, Path], tmp_path: Path) -> None:
    made = trainer(tmp_path, "solve", "grpo", max_completion_length=6)
    made.train()
    assert trl_runs.logged(made, "agent/merged_share") == [0.5]
    assert trl_runs.logged(made, "grad_norm")[0] > 0
    first = run[0].batches[0]
    # Whatever asked first, and in whichever process: a token depends on the rollout and its place alone.
    assert torch.equal(made.batches[0]["completion_ids"], first["completion_ids"])


def test_a_rollout_without_a_reward_is_graded_by_the_other_reward_functions(tmp_path: Path) -> None:
    made = trainer(tmp_path, "leave_it", "grpo")
    made.train()
    assert made._rewards[:, 0].isnan().all() and not made._rewards[:, 1].isnan().any()


def test_branches_are_refused_unless_the_longest_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 2 branches.*agent_branches='longest'"):
        trainer(tmp_path / "all", "ask_apart", "grpo", max_completion_length=8).train()
    made = trainer(tmp_path / "longest", "ask_apart", "grpo", branches="longest", max_completion_length=8)
    made.train()
    assert trl_runs.logged(made, "agent/branches_left_out") == [16.0]


@pytest.mark.filterwarnings("ignore")
def test_a_failed_rollout_is_left_out_and_most_stop_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path / "some", "sometimes", "grpo")
    made.train()
    failed = made._rewards.isnan().all(1)
    assert 0 < int(failed.sum()) < len(failed)
    (batch,) = made.batches
    sampled = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    assert (sampled.any(1) == ~failed).all() and (batch["advantages"][failed] == 0).all()
    with pytest.raises(RuntimeError, match=r"16 of 16 rollouts.*it made no request"):
        trainer(tmp_path / "none", "say_nothing", "grpo").train()


def test_the_script_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_agent.py").write_text(
        "async def solve(problem, client):\n"
        "    reply = await client.chat.completions.create(model='policy', messages=problem.prompt, max_tokens=3)\n"
        "    return float(len(reply.choices[0].message.content or ''))\n"
    )
    look_beside(tmp_path)
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    (script,) = re.findall(r"<!-- trl -->\n```py\n(.*?)```", page, re.DOTALL)
    prompts = [[{"role": "user", "content": f"{n}?"}] for n in range(8)]
    parts: dict[str, Any] = {
        "model": chat_model(),
        "args": trl_runs.config(tmp_path, max_steps=1),
        "tokenizer": chat_tokenizer(),
        "data": Dataset.from_dict({"prompt": prompts, "answer": list("01234567")}),
    }
    exec(compile(script, "docs/agents.md", "exec"), parts)
    parts["trainer"].train()
    assert trl_runs.logged(parts["trainer"], "rewards/agent_reward/mean")[0] > 0


def test_what_trimtabs_sampler_does_not_know_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, "solve", "grpo", min_p=0.1)
    with pytest.raises(ValueError, match=r"min_p=0.1 with agent_rollouts"):
        made.train()
    with pytest.raises(ValueError, match="agent_rollouts: name an agent"):
        agent_rollouts()
    with pytest.raises(ValueError, match="python:MODULE:NAME"):
        agent_rollouts("solve")
