"""The notebooks of the documentation: runs them anew, and turns them into pages of the site.

`python tools/notebooks.py` runs all of docs/notebooks and keeps their outputs; it takes about a minute.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parent.parent / "docs/notebooks"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # a terminal's colours
SECONDS = 600  # for one cell, on a busy machine


def execute(path: Path) -> dict[str, Any]:
    """Run a notebook in a kernel and an empty folder of its own; an exception in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    # `!trimtab` is the one of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, of a package that trimtab does not need
    notebook = nbformat.from_dict(json.loads(path.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=SECONDS, startup_timeout=SECONDS, record_timing=False, resources=resources
        ).execute()
    return dict(notebook)


def save(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook with its outputs, and without what differs from machine to machine."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = _joined(cell["outputs"])
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outputs with the pieces in which text arrived put together: how it was cut depends on the time."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if kept and output.get("name") and output["name"] == kept[-1].get("name"):
            kept[-1]["text"] = "".join(kept[-1]["text"]) + "".join(output["text"])
        else:
            kept.append(output)
    return kept


def page(path: Path) -> str:
    """Return a notebook as a page: cells in order, each with what it printed and drew."""
    notebook = json.loads(path.read_text())
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```{'bash' if source.startswith('!') else 'python'}\n{source.removeprefix('!')}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _shown(output))]
    link = f"[Download this notebook]({path.name}){{ download }}"
    return "\n\n".join([parts[0], link, *parts[1:]]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![what the cell above draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    # A progress line that was overwritten on a terminal is not shown.
    lines = [line.rpartition("\r")[2] for line in ESCAPES.sub("", text.replace("\r\n", "\n")).rstrip().split("\n")]
    return "```{ .text .output }\n" + "\n".join(lines) + "\n```" if text.strip() else ""


if __name__ == "__main__":
    for each in [Path(name) for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        save(each, execute(each))
        print(f"{each}: {each.stat().st_size / 1000:.0f} kB")
