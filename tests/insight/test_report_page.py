"""The page: one file that fetches nothing, whose policy lets its own script run and nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.insight.report_runs import Made, data_of, make_run
from trimtab.insight.report import page as paging
from trimtab.insight.report import write_report
from trimtab.insight.report.page import SCRIPTS, asset, joined_script
from trimtab.trainer.train import METRICS

ASSETS = Path(paging.__file__).with_suffix("")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("page") / "run", Made(steps=2))
    return write_report([run]).read_text(encoding="utf-8")


def test_the_policy_has_the_hash_of_the_script_that_is_there(page: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_nothing_in_the_page_points_outside(page: str) -> None:
    own = page.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which is never fetched
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", own)
    assert not re.search(r"<(link|iframe|object|embed|base|form)\b", own)
    assert not re.search(r"\b(src|href)=\"(?!#)", own)


def test_all_data_is_in_blocks_that_are_no_scripts(page: str) -> None:
    kinds = re.findall(r"<script([^>]*)>", page)
    assert kinds.count("") == 1
    assert all('type="application/json"' in kind for kind in kinds if kind)
    assert len(kinds) == 2 + len(data_of(page)["runs"][0]["responses"])


def test_the_microscopes_data_comes_last(page: str) -> None:
    assert page.index('id="data"') < page.index("<script>") < page.index('id="response-0"')


def test_every_script_is_joined_and_strict() -> None:
    assert {path.name for path in ASSETS.glob("*.js")} == set(SCRIPTS)
    assert joined_script().startswith('(function () {\n"use strict";')


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_insert_no_markup_and_request_nothing(name: str) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|fetch\(|XMLHttp|import\(|WebSocket"
    )
    assert not re.search(forbidden, asset(name))
    assert max(len(line) for line in asset(name).splitlines()) <= 180
    assert len(asset(name).splitlines()) <= 300


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_node_can_parse_the_script(tmp_path: Path) -> None:
    path = tmp_path / "joined.js"
    path.write_text(joined_script())
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_title_cannot_close_its_element(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>&amp;\u202e", Made(steps=1))
    page = write_report([run]).read_text(encoding="utf-8")
    assert "<title>&lt;b&gt;&amp;amp;\\u{202e} · trimtab report</title>" in page


@pytest.mark.parametrize("name", ["{{scripts}}", "{{style}}{{title}}", "\\1 \\g<0>"])
def test_a_name_like_a_template_placeholder_is_only_a_name(tmp_path: Path, name: str) -> None:
    page = write_report([make_run(tmp_path / name, Made(steps=1))]).read_text(encoding="utf-8")
    assert f"<title>{html.escape(name)} · trimtab report</title>" in page
    assert page.count("<style>") == 1 and data_of(page)["title"] == name


def test_a_report_can_be_made_again_and_is_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=2))
    first = write_report([run]).read_bytes()
    assert write_report([run]).read_bytes() == first
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_the_configuration_and_the_meaning_of_reasons_and_metrics_are_in_the_data(page: str) -> None:
    data = data_of(page)
    assert "tau_p = 0.2" in data["runs"][0]["config"]
    assert {"bit": 2, "name": "silenced", "text": "silenced: rare, confident and rewarded"} in data["reasons"]
    assert data["metric_descriptions"]["reward/mean"] == METRICS["reward/mean"]
    assert data["runs"][0]["compared_objectives"] == ["grpo", "dapo", "gspo", "stapo", "stare", "sspo"]


def test_a_gate_gives_the_entropy_its_target(tmp_path: Path) -> None:
    made = Made(steps=1, objective={"name": "stare"}, config="[objective]\nname = 'stare'\n")
    run = data_of(write_report([make_run(tmp_path / "run", made)]).read_text(encoding="utf-8"))["runs"][0]
    assert run["entropy_target"] == pytest.approx({"value": 0.3, "low": 0.22, "high": 0.42})
    assert run["spurious_region"] is None and "stare" not in run["compared_objectives"]


def test_silencing_gives_the_heat_map_its_region(page: str) -> None:
    spurious = data_of(page)["runs"][0]["spurious_region"]
    assert spurious["tau_p"] == 0.2 and spurious["tau_h"] == pytest.approx(1.2)
