"""Names of the form python:MODULE:NAME: where modules are found, and what is said where they are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trimtab as tt
from trimtab.own_parts import OwnPartError, errors_located, load_part, location, look_beside, was_loaded

WriteFile = Callable[[str, str], Path]


def error_of(name: str) -> str:
    with pytest.raises(OwnPartError) as caught:
        load_part(name)
    return str(caught.value)


def test_a_module_is_found_in_the_current_folder_and_beside_the_recipe_first(own_file: WriteFile) -> None:
    own_file("here.py", "def part(): return 'current folder'")
    own_file("recipes/there.py", "def part(): return 'beside the recipe'")
    assert load_part("python:here:part")() == "current folder"
    assert "there is no module there in ., sys.path" in error_of("python:there:part")
    look_beside("recipes")
    assert load_part("python:there:part")() == "beside the recipe"


def test_an_installed_module_comes_before_one_of_the_folder(own_file: WriteFile) -> None:
    own_file("textwrap.py", "def dedent(): return 'mine'")
    assert load_part("python:textwrap:dedent").__module__ == "textwrap"
    assert load_part("python:textwrap:dedent")("  x") == "x"


def test_the_folders_are_on_the_path_only_while_a_module_is_imported(own_file: WriteFile) -> None:
    own_file("mine.py", "import neighbour\ndef part(): return neighbour.VALUE")
    own_file("neighbour.py", "VALUE = 3")
    before = list(sys.path)
    assert load_part("python:mine:part")() == 3
    assert sys.path == before


def test_two_recipes_with_modules_of_one_name_are_not_mixed_up(own_file: WriteFile) -> None:
    own_file("one/twice.py", "def part(): return 1")
    own_file("two/twice.py", "def part(): return 2")
    look_beside("one")
    load_part("python:twice:part")
    look_beside("two")
    assert "two/twice.py has the same name: rename one of them" in error_of("python:twice:part")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("python:mine", "", "nothing of this name is registered here: write python:MODULE:NAME"),
        ("python:mine:", "", "is no name of a part: write python:MODULE:NAME, as python:mine:gentle"),
        ("python:mine.py:part", "", "there is no module mine.py in"),
        ("python:mine:part", "def part(:\n    pass", "mine.py:1: SyntaxError: invalid syntax"),
        ("python:mine:part", "import torch\n\nx = undefined", "mine.py:3: NameError: name 'undefined' is not defined"),
        (
            "python:mine:part",
            "import no_such_module",
            "mine.py:1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("python:mine:part", "import sys\nsys.exit('bye')", "mine.py:2: SystemExit: bye"),
        ("python:mine:prat", "def part(): pass", "mine.py has no prat: did you mean part?"),
        ("python:mine:part", "part = 3", "part of mine.py is 3, and no function or class"),
    ],
)
def test_a_mistake_is_one_line_with_the_file_and_the_line(
    own_file: WriteFile, name: str, text: str, message: str
) -> None:
    own_file("mine.py", text)
    said = error_of(name)
    assert said.startswith(name if ":" in name.removeprefix("python:")[:-1] else ("python:mine", "'python:mine:'"))
    assert message in said
    assert "\n" not in said
    assert not was_loaded(name)


def test_an_error_inside_a_library_is_said_with_the_users_line(own_file: WriteFile) -> None:
    own_file("mine.py", "import json\n\ndef part():\n    return json.loads('{')")
    part = load_part("python:mine:part")
    assert location(part) == "mine.py:3"
    with (
        pytest.raises(OwnPartError, match=r"^python:mine:part: mine.py:4: JSONDecodeError: "),
        errors_located("python:mine:part"),
    ):
        part()


def test_what_is_made_in_a_notebook_is_registered_under_its_name(own_file: WriteFile) -> None:
    @tt.register
    def half(x: float) -> float:
        return x / 2

    tt.register(half, name="other")
    assert load_part("python:half")(3) == load_part("python:other")(3) == 1.5
    assert "registered are half, other" in error_of("python:quarter")
    with pytest.raises(OwnPartError, match="register takes a function or class that has a name, not 3"):
        tt.register(3)
    with pytest.raises(OwnPartError, match="that has a name, not <function"):
        tt.register(lambda: 3)
