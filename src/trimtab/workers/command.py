"""`trimtab sandbox`: run one program, or say what holds on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import IO, Any

from trimtab.text import printable
from trimtab.workers.results import KILLED_KINDS, SandboxError
from trimtab.workers.sandbox import MAX_PROGRAM, Sandbox

EXIT_CODES = {"ok": 0, "exception": 1, "refused": 2} | dict.fromkeys(KILLED_KINDS, 3)


def probe_lines() -> list[str]:
    """Say what holds on this machine and, for each layer that does not, why and how to get it."""
    with Sandbox(level="limits", workers=1) as sandbox:
        assert sandbox.probe is not None
        return [sandbox.probe.line(), *(f"missing: {text}" for text in sandbox.probe.missing())]


def run_input(
    source: IO[bytes], out: IO[str], errors: IO[str], timeout: float, *, as_json: bool, **options: Any
) -> int:
    """Run a program, print what it printed, and return the command's exit code."""
    try:
        code = source.read(MAX_PROGRAM + 1).decode()
    except UnicodeDecodeError as error:
        raise SandboxError(f"the program is not UTF-8: {error}") from None
    with Sandbox(**options) as sandbox:
        result = sandbox.run(code, timeout=timeout)
    if as_json:
        out.write(json.dumps(asdict(result)) + "\n")
    else:
        # Escape sequences are shown and not obeyed; tabs are harmless, and tables are made of them.
        for stream, text in ((out, result.stdout), (errors, result.error)):
            shown = "\t".join(map(printable, text.split("\t")))
            stream.write(shown if not shown or shown.endswith("\n") else shown + "\n")
    out.flush()
    return EXIT_CODES[result.kind]
