"""A method of one's own is named in TRL and verl as in a recipe."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab import own_parts

MINE = """
import trimtab as tt

def gentle(softness: float = 0.5) -> tt.Objective:
    return tt.objective("dapo", clip_low=0.2 * softness, clip_high=0.28 * softness)

def ranks(reward, group):
    return reward - reward.mean()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine_of_engines.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_parts, "_folders", [])
    yield
    sys.modules.pop("mine_of_engines", None)


NAME = "python:mine_of_engines:gentle + s2t"


def test_in_trl(mine: None, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trimtab.engines.options import objective_table
    from trimtab.engines.trl import TrimtabConfig
    from trimtab.trainer.config import build_objective

    table = {"name": NAME, "softness": 0.25, "advantage": "python:mine_of_engines:ranks"}
    args = TrimtabConfig(output_dir=str(tmp_path / "out"), objective=table, use_cpu=True, bf16=False)
    built = build_objective(objective_table(args.objective))
    assert "clip(r, 0.95, 1.07)" in built.explain()
    assert built.advantages([1.0, 0.0], [0, 0]).tolist() == [0.5, -0.5]
    with pytest.raises(
        ValueError, match=r"unknown option of python:mine_of_engines:gentle.* 'sofness': did you mean sof"
    ):
        TrimtabConfig(
            output_dir=str(tmp_path / "out"), objective={"name": NAME, "sofness": 1}, use_cpu=True, bf16=False
        )


def test_in_verl(mine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    import helpers.engines.verl_quiet  # noqa: F401
    from helpers.engines.verl_configs import changed
    from trimtab.engines.verl.options import check_config, read_options
    from trimtab.engines.verl.planning import PlannedLoss
    from trimtab.own_parts import module_folders
    from trimtab.trainer.config import build_objective

    words = ["algorithm.adv_estimator=grpo", f'+trimtab.objective="{NAME}"', "+trimtab.softness=0.25"]
    config = changed(words)
    options = read_options(OmegaConf.to_container(config.trimtab, resolve=True))
    objective = build_objective(options.objective)
    check_config(config, options, objective)
    assert "clip(r, 0.95, 1.07)" in objective.explain()
    # A worker has another current folder, and finds the module where the driver does.
    sent = pickle.dumps(PlannedLoss(options.objective, tuple(module_folders())))
    del sys.modules["mine_of_engines"]
    (tmp_path / "worker").mkdir()
    monkeypatch.chdir(tmp_path / "worker")
    assert pickle.loads(sent).objective.explain() == objective.explain()
    # Advantages are verl's there.
    own = build_objective({"name": "grpo", "advantage": "python:mine_of_engines:ranks"})
    with pytest.raises(ValueError, match="ranks is an advantage of your own, and in verl the advantages are verl's"):
        check_config(changed(words[:1]), options, own)
