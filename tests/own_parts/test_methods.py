"""Methods, attachments and advantages of the user's own: their options, what they are checked for, where they work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trimtab as tt
from trimtab.objectives import option_names
from trimtab.objectives.methods import compose
from trimtab.trainer.config import load

WriteFile = Callable[[str, str], Path]

MINE = '''
    from dataclasses import replace
    from typing import Annotated, Literal

    import torch
    import trimtab as tt
    from trimtab.objectives import TokenRule

    Side = Literal["both", "up"]

    def gentle(softness: Annotated[float, "how soft"] = 0.5, side: Side = "both", rate=3) -> tt.Objective:
        """PPO with a narrow clip.

        Where softness is 0 nothing moves.
        """
        if softness < 0:
            raise ValueError(f"softness={softness}: it is at least 0")
        low = 0.2 * softness if side == "both" else 0.2
        return tt.objective("dapo", clip_low=low, clip_high=0.2 * softness)

    def calm(share: float = 0.5) -> TokenRule:
        """Lower the weight of improbable tokens."""
        def apply(builder):
            builder.multiply((builder.logp < -3).nonzero().squeeze(1), share, tt.Reason.DAMPED)
        return TokenRule("calm", f"w = {share:g} where ln p < -3", apply)

    def ranks(reward, group):
        """Half of each group up, half down."""
        return torch.where(reward > reward.mean(), 1.0, -1.0)
'''


def error_of(name: str, **options: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        tt.objective(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_arguments_are_options_and_attachments_combine(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    objective = tt.objective("python:mine:gentle + s2t + python:mine:calm(share=0.25)", softness=1, tau_p=0.1)
    assert objective.name == "python:mine:gentle + s2t + python:mine:calm"
    assert objective.title == "PPO with a narrow clip."
    text = objective.explain()
    assert "clip(r, 0.8, 1.2)" in text and "p < 0.1" in text and "w = 0.25 where ln p < -3" in text
    assert {"softness", "tau_p", "share", "scope"} <= option_names("python:mine:gentle + s2t + python:mine:calm")
    assert "clip(r, 0.9, 1.1)" in tt.objective("python:mine:gentle").explain()
    assert "w = 0.1 where" in tt.objective("grpo", **{"python:mine:calm": 0.1}).explain()


def test_an_option_has_the_type_of_its_default_and_no_range_of_ours(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    assert tt.objective("python:mine:gentle", rate=200)  # STARE's rate is at most 1
    assert error_of("python:mine:gentle", rate=0.5) == "python:mine:gentle: option rate=0.5 must be a whole number"
    assert "option side='down' must be one of both, up" in error_of("python:mine:gentle", side="down")
    assert "unknown option of python:mine:gentle 'sofness': did you mean softness?" in error_of(
        "python:mine:gentle", sofness=1
    )
    said = error_of("python:mine:gentle", softness=-1)
    assert said == "python:mine:gentle: mine.py:16: ValueError: softness=-1.0: it is at least 0"


def test_the_page_of_a_method_and_of_an_attachment(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    page = compose.describe("python:mine:gentle")
    assert "| `softness` | 0.5 | how soft |" in page and "| `side` | both |  (both, up) |" in page
    assert "Where softness is 0 nothing moves." in page and "clip(r, 0.9, 1.1)" in page
    assert "Attaches to any method: `dapo + python:mine:calm`." in compose.describe("python:mine:calm")
    assert "clip(r, 0.9, 1.1)" in compose.describe("python:mine:gentle + s2t")


def test_an_advantage_by_name(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    objective = tt.objective("grpo", advantage="python:mine:ranks")
    assert objective.advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]).tolist() == [1.0, -1.0, -1.0, -1.0]
    assert tt.objective("grpo(advantage=python:mine:ranks)").advantage == "python:mine:ranks"
    assert tt.objective("grpo", advantage="leave_one_out").advantage == "leave_one_out"
    assert "must be one of group_normalized, group_centered, leave_one_out" in error_of("grpo", advantage="median")


def test_a_recipe_remembers_where_its_modules_are(own_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    own_file("project/mine.py", MINE)
    recipe = own_file("project/mine.toml", 'objective = { name = "python:mine:gentle", softness = 0.25 }')
    config = load(recipe)
    assert "clip(r, 0.95, 1.05)" in config.build_objective().explain()
    assert config.run.python_path == [str(recipe.parent), str(recipe.parent.parent)]
    assert load(recipe, ["objective.name=grpo"]).run.python_path is None


def test_a_registered_method_is_used_by_its_name(own_file: WriteFile) -> None:
    @tt.register
    def narrow(by: float = 0.1) -> tt.Objective:
        return tt.objective("grpo", clip_low=by, clip_high=by)

    assert "clip(r, 0.7, 1.3)" in tt.objective("python:narrow + s2t", by=0.3).explain()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def part(x): ...", "mine.py:4: its argument 'x' needs a default: arguments are options"),
        ("def part(*x): ...", "mine.py:4: its argument 'x' is no option: name every option"),
        ("def part(x=[1]): ...", "mine.py:4: its argument 'x' has the type <class 'list'>: an option is a number,"),
        ("def part(x: 'flaot' = 1): ...", "mine.py:4: NameError: name 'flaot' is not defined"),
        ("def part(scope: int = 1): ...", "mine.py:4: every method has an option 'scope': call yours otherwise"),
        ("def part(): return 3", "mine.py:4: it returned 3, and a method is an Objective"),
        (
            "def part(): return tt.objective('gprpo')",
            "mine.py:4: ValueError: unknown method 'gprpo': did you mean grpo",
        ),
        (
            "def part(): return TokenRule('x', 'x', print)",
            "mine.py:4: it returns an attachment: write for example 'dapo + py",
        ),
        (
            "def terms(ratio, new, plan): return ratio * plan.advantag, None\n"
            "def part(): return replace(tt.objective('grpo'), surrogate=Surrogate('l = r A', terms))",
            "mine.py:4: AttributeError: 'Plan' object has no attribute 'advantag'",
        ),
        (
            "def terms(ratio, new, plan): return ratio / 0, None\n"
            "def part(): return replace(tt.objective('grpo'), surrogate=Surrogate('l = r A', terms))",
            "mine.py:5: on a small batch its loss or gradient is not finite",
        ),
        (
            "def part(): return replace(tt.objective('grpo'), advantage='median')",
            "mine.py:4: ValueError: unknown advantage 'median': there are group_normalized,",
        ),
    ],
)
def test_a_mistake_in_a_method_is_found_when_it_is_named(own_file: WriteFile, text: str, message: str) -> None:
    start = "from dataclasses import replace\nimport trimtab as tt\n"
    start += "from trimtab.objectives import Surrogate, TokenRule\n"
    own_file("mine.py", start + text)
    assert message in error_of("python:mine:part")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "return reward.sum()",
            "mine.py:2: it returned a tensor of shape (), and not a tensor with a value for each of",
        ),
        ("return None", "mine.py:2: it returned None, and not a tensor"),
        ("return reward / 0", "mine.py:2: an advantage is NaN or infinite"),
        ("return reward - rewards.mean()", "mine.py:3: NameError: name 'rewards' is not defined"),
    ],
)
def test_a_mistake_in_an_advantage_is_found_when_it_is_named(own_file: WriteFile, text: str, message: str) -> None:
    own_file("mine.py", f"import torch\ndef part(reward, group):\n    {text}")
    assert message in error_of("grpo", advantage="python:mine:part")


def test_a_method_is_no_attachment(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    assert "mine.py:10: it returns an Objective, so it is a method: write it first" in error_of(
        "grpo + python:mine:gentle"
    )
    assert "one of your own: python:MODULE:NAME" in error_of("gentel")


def test_trying_a_method_draws_no_random_number(own_file: WriteFile) -> None:
    own_file("mine.py", MINE)
    torch.manual_seed(3)
    tt.objective("python:mine:gentle")
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
