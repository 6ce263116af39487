"""TRL's trainer on a GPU with our objectives, sampling with transformers and with vLLM in the same process.

The record of a run is planned again by the core alone, on a CPU: it must give the plan that the trainer used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.insight.replay.batches import as_tensor, recorded_mini_batch, replan, set_controllers
from trimtab.record import open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # TRL and vLLM warn about their own code
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 64,
}
OPTIONS = {"max_steps": 3, "per_device_train_batch_size": 128, "num_generations": 8, "learning_rate": 7e-4}


@pytest.fixture(scope="module")
def trl_runs() -> Any:
    return import_module("helpers.engines.trl_runs")  # which needs TRL


@pytest.fixture(scope="module")
def warm(trl_runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that gets some sums right, saved where vLLM can read it."""
    folder = tmp_path_factory.mktemp("warm")
    model = trl_runs.warm_model()
    model.save_pretrained(folder)
    trl_runs.demo_tokenizer().save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@pytest.mark.parametrize(("objective", "sampler"), [("stare", {}), ("stapo(tau_p=0.2) + tis", VLLM)])
def test_it_trains_and_the_plan_is_the_cores(
    objective: str, sampler: dict[str, Any], trl_runs: Any, warm: Any, tmp_path: Path
) -> None:
    if sampler and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    options = {**OPTIONS, **sampler, "use_cpu": False, "bf16": True, "record": str(tmp_path / "record")}
    start = {name: weight.detach().clone() for name, weight in warm.state_dict().items()}
    trainer = trl_runs.trainer(warm, trl_runs.config(tmp_path / "run", objective=objective, **options))
    trainer.train()
    assert trainer.state.global_step == 3
    assert all(norm > 0 for norm in trl_runs.logged(trainer, "grad_norm"))
    step = open_run(tmp_path / "record").step(1)
    for update in step.updates:
        batch = recorded_mini_batch(update, trainer.objective.needs).batch
        set_controllers(trainer.objective, step, recorded=True)
        (plan,) = replan(trainer.objective, batch, update)
        # A quantile of sums made on the GPU may move by a bit, and with it the token on the threshold.
        assert (plan.weight == as_tensor(update.column("weight"))).float().mean() > 0.999
        torch.testing.assert_close(plan.scale, as_tensor(update.column("scale")))
    if sampler:
        off = step.tokens["sampler_logp"] - step.tokens["old_logp"]
        assert 0 < abs(off).mean() < 0.1
    warm.load_state_dict(start)
