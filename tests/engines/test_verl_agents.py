"""A user's own agent in verl's agent loops: an endpoint over the rollout server, branches as outputs of a session."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import TokenOutput

import trimtab as tt
from helpers.engines.verl_batches import TOKENIZER, nested, random_batch
from helpers.engines.verl_configs import changed
from helpers.engines.verl_runs import run, write_inputs
from helpers.insight.exact_plans import assert_plans_come_again
from trimtab.data import rollout_ids
from trimtab.engines import AGENT_LOOP_KEY, AGENT_STATS, OWN_AGENT_LOOP
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl import agents
from trimtab.engines.verl.agents import TrimtabAgentLoop
from trimtab.engines.verl.options import check_config, read_options
from trimtab.engines.verl.planning import places, plan_step
from trimtab.engines.verl.trainer import TrimtabRayTrainer, agent_metrics, record_step, start_recording
from trimtab.record import open_run
from trimtab.trainer.config import build_objective

AGENT = "python:helpers.engines.own_agent:"
LOOP = f"{AGENT_LOOP_KEY}={OWN_AGENT_LOOP}"


@dataclass
class Scripted:
    """A rollout server that gives these texts in turn, and notes what it was asked."""

    texts: list[str]
    logprobs: bool = True
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.asked.append((request_id, TOKENIZER.decode(prompt_ids), dict(sampling_params)))
        ids = TOKENIZER.encode(self.texts[(len(self.asked) - 1) % len(self.texts)])
        logp = [-0.5] * len(ids) if self.logprobs else None
        return TokenOutput(token_ids=ids, log_probs=logp, stop_reason="completed", extra_fields={"global_steps": 7})


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    """Hosts are kept for a whole process: these end with their test."""
    yield
    for host in agents._hosts.values():
        host.endpoint.close()
        host._pool.close()
    agents._hosts.clear()


def rollout(server: Scripted, name: str, *overrides: str, sampling: dict[str, Any] | None = None) -> Any:
    """One rollout of an agent in verl's agent loop, without Ray."""
    wanted = ["data.max_prompt_length=64", "data.max_response_length=64", f"+trimtab.agent={AGENT}{name}"]
    config = changed([*wanted, "+trimtab.agent_concurrency=2", *overrides])

    async def run_loop() -> Any:
        loop = TrimtabAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap([]),
        )
        row = {"raw_prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
        given = {"temperature": 1.0, "top_p": 1.0, "logprobs": True} if sampling is None else sampling
        return await loop.run(given, **row, extra_info={"index": 3}, data_source="sums")

    return asyncio.run(run_loop())


def test_branches_of_a_rollout_are_outputs_of_a_session() -> None:
    server = Scripted(["12<|im_end|>", "345<|im_end|>"])
    outputs = rollout(server, "ask_apart")
    assert [TOKENIZER.decode(output.prompt_ids) for output in outputs] == [prompt for _, prompt, _ in server.asked]
    assert [TOKENIZER.decode(output.response_ids) for output in outputs] == ["12<|im_end|>", "345<|im_end|>"]
    assert [output.reward_score for output in outputs] == [5.0, 5.0]
    assert all(output.response_mask == [1] * len(output.response_ids) for output in outputs)
    assert all(output.response_logprobs == [-0.5] * len(output.response_ids) for output in outputs)
    assert all(output.extra_fields["last_message"] == "345" for output in outputs)
    assert all(output.extra_fields["min_global_steps"] == 7 for output in outputs)
    assert [AGENT_STATS in output.extra_fields for output in outputs] == [True, False]
    assert all(params["max_tokens"] == 4 and params["temperature"] == 1.0 for _, _, params in server.asked)
    json.dumps(outputs[0].extra_fields)  # a reward function gets them, and may log them
    metrics = agent_metrics([{}, {}], [output.extra_fields for output in outputs])
    assert metrics["trimtab/agent/branches_mean"] == 2.0 and metrics["trimtab/agent/requests_mean"] == 2.0


def test_of_several_branches_the_longest_alone_can_be_trained() -> None:
    outputs = rollout(Scripted(["12<|im_end|>", "345<|im_end|>"]), "ask_apart", "+trimtab.agent_branches=longest")
    assert [TOKENIZER.decode(output.response_ids) for output in outputs] == ["345<|im_end|>"]
    assert agent_metrics([{}], [outputs[0].extra_fields])["trimtab/agent/branches_left_out"] == 1.0


def test_a_conversation_goes_on_from_its_tokens_on_the_same_server() -> None:
    server = Scripted(["12<|im_end|>", "3<|im_end|>"])
    outputs = rollout(server, "solve")
    first, second = server.asked
    if len(outputs) == 1:
        assert first[0] == second[0] and second[1].startswith(first[1] + "12<|im_end|>")
        mask, logp = outputs[0].response_mask, outputs[0].response_logprobs
        assert mask[:3] == [1, 1, 1] and mask[-2:] == [1, 1] and 0 in mask
        assert logp == [-0.5 if mine else 0.0 for mine in mask]
    assert sum(sum(output.response_mask) for output in outputs) == 5
    assert outputs[0].reward_score == pytest.approx(3.03)


def test_a_rollout_without_a_reward_is_graded_by_verl() -> None:
    (output,) = rollout(Scripted(["12<|im_end|>"]), "leave_it", sampling={"temperature": 1.0, "logprobs": False})
    assert output.reward_score is None and "reward_extra_info" not in output.extra_fields
    assert output.extra_fields["last_message"] == "12"
    assert output.response_logprobs is None  # as without an agent: calculate_log_probs is off


@pytest.mark.parametrize(
    ("name", "server", "words"),
    [
        ("say_nothing", Scripted(["1"]), "it made no request to the endpoint"),
        ("pay_each", Scripted(["1<|im_end|>"]), "in TRL and verl a rollout has one reward"),
        ("leave_it", Scripted(["1"], logprobs=False), "0 tokens"),
    ],
)
def test_what_cannot_be_trained_is_an_error_in_words(name: str, server: Scripted, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        rollout(server, name)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"agent_timeout": 5}, "trimtab.agent_timeout without an agent"),
        ({"agent": "my_agent:solve"}, "python:MODULE:NAME"),
        ({"agent": AGENT + "solve", "agent_command": ["python", "x.py"]}, "set one of them"),
        ({"agent": AGENT + "solve", "tools": ["python"]}, "brings its own tools"),
        ({"agent": AGENT + "solve", "agent_branches": "none"}, "agent_branches='none' must be 'all' or 'longest'"),
    ],
)
def test_a_wrong_option_for_agents_is_an_error(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options({"objective": "grpo", **keys})


def problems(*overrides: str, **options: Any) -> str:
    given = EngineOptions(objective={"name": "grpo"}, **options)
    try:
        check_config(changed(["algorithm.adv_estimator=grpo", *overrides]), given, build_objective({"name": "grpo"}))
    except ValueError as error:
        return str(error)
    return ""


def test_what_an_agent_cannot_be_combined_with_is_refused_at_the_start() -> None:
    assert problems(LOOP, agent=AGENT + "solve") == ""
    assert f"set {LOOP}" in problems(agent=AGENT + "solve")
    assert "without an agent" in problems(LOOP)
    assert "as if each were a rollout" in problems(LOOP, "algorithm.adv_estimator=rloo", agent=AGENT + "solve")
    ours = "reward.custom_reward_function.path=pkg://trimtab.engines.verl.reward"
    assert "set naive" in problems(LOOP, ours, "reward.reward_manager.name=dapo", agent=AGENT + "solve")


def test_the_settings_of_the_page_are_settings() -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    (settings,) = re.findall(r"<!-- verl -->\n```bash\n(.*?)```", page, re.DOTALL)
    config = changed(["algorithm.adv_estimator=grpo", "+trimtab.objective=grpo", *settings.split()])
    options = read_options(config.trimtab)
    assert options.agent == "python:my_agent:solve" and options.agent_timeout == 300.0
    check_config(config, options, build_objective({"name": "grpo"}))


def test_means_over_responses_are_over_rollouts_of_verls_keys() -> None:
    rows = places(["a-b_0_0", "a-b_0_1", "a-b_1_0", "c_0_0", "c_0_1", "c_0_2", "c_1_0", "pad_0_0"])
    ids = rollout_ids([row.prompt for row in rows], [row.rollout for row in rows])
    assert ids == [0, 0, 1, 2, 2, 2, 3, 4]
    data = random_batch(3)
    grpo = tt.objective("grpo(aggregation=seq-mean-token-sum)")
    planned = plan_step(grpo, data, 8, 1, TOKENIZER, rollouts=ids)
    counted = {ids[row] for row in range(8) if bool(data["response_mask"].unbind()[row].any())}
    scale = planned.plans[0].scale
    assert torch.allclose(scale, torch.full_like(scale, 1 / len(counted)))
    alone = plan_step(grpo, data, 8, 1, TOKENIZER, rollouts=range(8)).plans[0].scale
    assert torch.equal(alone, plan_step(grpo, data, 8, 1, TOKENIZER).plans[0].scale)


def test_a_step_with_branches_has_as_many_updates_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = object.__new__(TrimtabRayTrainer)
    sizes = [
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    trainer.config = changed([*sizes, "actor_rollout_ref.actor.use_dynamic_bsz=True", LOOP])
    trainer.timing_raw, seen = {}, []
    monkeypatch.setattr(PPOTrainerSync, "_get_required_batch_multiple", lambda self, ranks: 99)
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch: self._get_required_batch_multiple(3))
    monkeypatch.setattr(TrimtabRayTrainer, "_plan", lambda self, batch, metrics, rows: seen.append(rows) or batch)

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        seen.append(self.config.actor_rollout_ref.actor.ppo_mini_batch_size * 2)
        metrics["actor/trimtab/update/loss"] = 0.0
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)

    class Batch(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.keys)

    def batch(rows: int, sessions: int = 8) -> Any:
        keys = [f"p_{row % sessions}_{row // sessions}" for row in range(rows)]
        return Batch(keys=keys, tags=[{}] * rows)

    assert trainer._balance_batch(batch(8)) == 99
    trainer._update_actor(batch(8), {})
    assert trainer._balance_batch(batch(13)) == 12  # two updates of a multiple of 2 samples and 3 ranks
    trainer._update_actor(batch(24), {})
    assert seen == [4, 4, 12, 12]
    assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    with pytest.raises(RuntimeError, match="in 5 of 8 rollouts of this step the agent failed"):
        trainer._balance_batch(batch(6, sessions=3))


def test_records_have_the_branches_and_a_replay_makes_the_same_plans(tmp_path: Path) -> None:
    rows = places(["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_0_1", "b_0_2", "b_1_0", "pad_0_0"])
    data = random_batch(5)
    ids = rollout_ids([row.prompt for row in rows], [row.rollout for row in rows])
    data["rm_scores"] = nested([torch.ones(len(mask)) for mask in data["response_mask"].unbind()])
    data["uid"] = np.array([row.prompt for row in rows], dtype=object)
    data["reward_model"] = np.array([{"ground_truth": "2"}] * 8, dtype=object)
    table = {"name": "stapo", "aggregation": "seq-mean-token-mean"}
    objective = build_objective(table)
    planned = plan_step(objective, data, 8, 1, TOKENIZER, ["token", "entropy"], ids)
    recorder = start_recording(EngineOptions(objective=table, record=str(tmp_path)), objective, TOKENIZER, 0)
    assert recorder is not None
    record_step(recorder, 1, planned, data, objective, TOKENIZER.eos_token_id, rows)
    recorder.close()
    records = open_run(tmp_path)
    assert records.step(1).rollouts == ids
    assert records.step(1).responses["branch"].tolist() == [row.branch for row in rows]
    assert assert_plans_come_again(records)


@pytest.mark.slow
def test_a_run_with_an_agent_trains_its_branches(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    ours = ("trainer.v1.trainer_mode=trimtab", "+trimtab.objective=dr_grpo", "algorithm.norm_adv_by_std_in_grpo=False")
    more = (LOOP, f"+trimtab.agent={AGENT}ask_apart", "+trimtab.agent_concurrency=4", "data.max_prompt_length=24")
    code, said = run(tmp_path, 2, *ours, *more, f"+trimtab.record={tmp_path}/records")
    assert code == 0, said[-3000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["trimtab/agent/branches_mean"] for step in steps] == [2.0, 2.0]
    assert all(step["actor/grad_norm"] > 0 and step["trimtab/responses/missing"] == 0 for step in steps)
    step = open_run(tmp_path / "records").step(1)
    assert len(step.info.updates) == 2 and step.rollouts is not None
    sizes = torch.tensor(step.rollouts).bincount()
    assert sizes[sizes > 1].tolist() == [2] * 16
