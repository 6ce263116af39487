"""What the documents show is run as written."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.objectives import METHODS
from trimtab.objectives.methods import catalog
from trimtab.trainer.config import load, parse_toml

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def toml_blocks(name: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_example_of_a_training_loop_runs_and_accumulates_the_gradient_of_one_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code,) = blocks("docs/objectives.md")
    # The weights as they are before the step of the optimizer, whose gradients are looked at.
    names: dict[str, Any] = {}
    exec(compile(code.replace("optimizer.step()\n", ""), "docs/objectives.md", "exec"), names)
    said = capsys.readouterr().out
    assert "stapo: Clip-higher PPO" in said
    assert "silenced: rare, confident and rewarded" in said
    assert "nan" not in said
    model, parameters = names["model"], list(names["model"].parameters())
    accumulated = [parameter.grad.clone() for parameter in parameters]
    assert sum(float(gradient.abs().sum()) for gradient in accumulated) > 0.1
    model.zero_grad()
    new_logp, _ = names["score"](names["ids"], names["attention"])
    names["objective"].loss(names["batch"].pack(new_logp), names["plan"]).loss.backward()
    for before, parameter in zip(accumulated, parameters, strict=True):
        torch.testing.assert_close(before, parameter.grad, rtol=1e-4, atol=1e-7)


def test_the_example_of_a_new_method_is_all_it_takes() -> None:
    function, test = blocks("CONTRIBUTING.md")
    # Each block is put at the end of the file that the page names, and has what that file imports.
    catalog_names, test_names = dict(vars(catalog)), runpy.run_path(str(ROOT / "tests/objectives/test_baselines.py"))
    before = set(test_names)
    try:
        exec(compile(f"from __future__ import annotations\n{function}", "CONTRIBUTING.md", "exec"), catalog_names)
        exec(compile(f"from __future__ import annotations\n{test}", "CONTRIBUTING.md", "exec"), test_names)
        (new,) = set(test_names) - before - {"annotations"}
        test_names[new]()
        assert "rloo" in METHODS and METHODS["rloo"].title
        test_catalog = runpy.run_path(str(ROOT / "tests/objectives/test_catalog.py"))
        test_catalog["test_every_method_is_there"]()
        test_catalog["test_every_option_has_one_meaning_and_every_meaning_an_option"]()
    finally:
        METHODS.pop("rloo", None)


def test_the_heads_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/gpu.md")
    made: dict[str, Any] = {}
    exec(compile(code, "docs/gpu.md", "exec"), made)
    assert "torch.Size([6, 16]) torch.Size([101, 16])" in capsys.readouterr().out
    hidden = made["hidden"].requires_grad_()
    logp = (hidden @ made["head"].weight.T / 0.7).log_softmax(-1).gather(1, made["token"][:, None]).squeeze(1)
    ratio, advantage = (logp - made["old"].logp).exp(), made["advantage"]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).mean()
    (gradient,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(made["made"].hidden, gradient, rtol=1e-4, atol=1e-6)


def test_the_sandboxs_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/sandbox.md")
    code = code.replace("Sandbox(workers=2)", 'Sandbox(workers=2, level="limits")').replace(
        "5.0", "60.0"
    )  # any machine
    exec(compile(code, "docs/sandbox.md", "exec"), {})
    assert capsys.readouterr().out == "ok 45\n\n[-sqrt(2), sqrt(2)]\n\n"


def test_the_example_of_a_run_from_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/start.md")
    short = '"run.steps": 2, "warm_start.steps": 2, "run.eval_every": 0, "rollout.prompts": 4'
    assert '"run.steps": 20' in code
    names: dict[str, Any] = {}
    exec(compile(code.replace('"run.steps": 20', short), "docs/start.md", "exec"), names)
    assert "\nfinished 2\n" in capsys.readouterr().out
    assert names["run"].path == Path("runs/demo-dapo-1") and names["steps"] == [1, 2]


def test_every_linked_file_is_there() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#\s]+)[)#]", page.read_text()):
            # The gallery's pages are made with the site, whose links tests/site checks.
            assert (page.parent / target).exists() or re.match(r"gallery/\w+\.html$", target), f"{page.name}: {target}"


def test_the_readme_says_the_two_commands_of_a_clone() -> None:
    text = (ROOT / "README.md").read_text()
    assert "`make demo`" in text and "`make test`" in text and "make test" in (ROOT / ".ci/run").read_text()


def test_every_promise_of_security_names_tests_that_exist() -> None:
    promises = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("- ")]
    assert len(promises) > 20
    for promise in promises:
        links = re.findall(r'\[test\]\((\S+\.py) "([^"]+)"\)', promise)
        assert links, f"no test shows: {promise}"
        for path, names in links:
            defined = set(re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE))
            assert set(names.split(", ")) <= defined, f"{path} lacks {set(names.split(', ')) - defined}"


def test_every_path_on_the_map_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    paths = re.findall(r"`([\w/]+(?:/|\.py|\.html))`", tables) + re.findall(r"`(tests/\w+)`", tables)
    assert len(paths) > 50
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "src/trimtab" / path).exists(), f"docs/architecture.md names {path}"


def test_the_recipe_of_a_users_own_is_one(tmp_path: Path) -> None:
    (recipe,) = toml_blocks("docs/recipes.md")
    (tmp_path / "mine.toml").write_text(recipe)
    config = load(tmp_path / "mine.toml")
    assert config.build_objective().name == "stapo"
    assert config.rollout.prompts * config.rollout.samples == 512


@pytest.mark.parametrize("page", ["docs/start.md", "docs/own-data.md"])
def test_the_guides_show_the_recipe_of_the_reference(page: str) -> None:
    assert parse_toml(toml_blocks(page)[0]) == parse_toml(toml_blocks("docs/recipes.md")[0])


def test_the_recipe_of_six_lines_takes_the_tables_that_its_page_adds(tmp_path: Path) -> None:
    recipe, task, several_files, environment, warm_start = toml_blocks("docs/own-data.md")
    lines = [line for line in recipe.splitlines(keepends=True) if not line.startswith("task")]
    assert len(lines) == 5
    for section in (task, several_files, environment):
        (tmp_path / "mine.toml").write_text("".join([*lines, section, warm_start]))
        config = load(tmp_path / "mine.toml")
        assert (config.model.path, config.warm_start.steps) == ("Qwen/Qwen3-1.7B-Base", 100)


def test_every_page_installs_from_a_clone_until_an_index_has_trimtab() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/notebooks").glob("*.ipynb")]
    assert [page.name for page in pages if re.search(r"pip install '?trimtab", page.read_text())] == []
    first = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first and [line.split("  ")[0] for line in first[1].splitlines()] == [
        "make demo",
        "make test",
        "pip install .",
    ]


def test_the_install_page_has_every_extra() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    rows = [
        line.split("|")[1] for line in (ROOT / "docs/install.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == extras - {"dev", "site"}


def test_first_settings_are_those_of_the_recipes() -> None:
    page = (ROOT / "docs/first-settings.md").read_text()
    rows = re.findall(r"^\| [\d.]+ .*? \| `([\w.-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 9
    for name, values in rows:
        config = load(name)
        rollout, update = config.rollout, config.update
        lr = f"{update.lr:.0e}".replace("e-0", "e-")
        made = [
            lr,
            f"{rollout.prompts} x {rollout.samples}",
            update.per_step,
            rollout.max_new_tokens,
            update.token_budget,
        ]
        assert values == " | ".join(map(str, made)), name


def test_our_names_beside_those_of_other_trainers_are_keys_of_recipes() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/coming-from.md").read_text(), re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]
    assert len(keys) > 25
    table = load("smollm2", ["task.name=file", "task.path=x.jsonl"]).model_dump()
    for key in keys:
        section, _, name = key.partition(".")
        assert name in table[section] or not name, key
