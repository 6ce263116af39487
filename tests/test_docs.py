"""What the documents show is run as written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config import load, parse_toml
from trimtab.objectives import METHODS
from trimtab.objectives.methods import catalog

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def toml_blocks(name: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_example_of_a_training_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/objectives.md")
    exec(compile(code, "docs/objectives.md", "exec"), {})
    said = capsys.readouterr().out
    assert "stapo: Clip-higher PPO" in said
    assert "silenced: rare, confident and rewarded" in said
    assert "nan" not in said


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
    recipe, task, several_files, warm_start = toml_blocks("docs/own-data.md")
    lines = [line for line in recipe.splitlines(keepends=True) if not line.startswith("task")]
    assert len(lines) == 5
    for section in (task, several_files):
        (tmp_path / "mine.toml").write_text("".join([*lines, section, warm_start]))
        config = load(tmp_path / "mine.toml")
        assert (config.model.path, config.warm_start.steps) == ("Qwen/Qwen3-1.7B-Base", 100)
