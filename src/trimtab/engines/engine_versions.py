"""The engine versions that were tested, and what to tell the user of another one or of none.

Imports neither torch nor much else: verl's plug-in needs it in every process.
"""

from __future__ import annotations

import importlib.metadata
import warnings

from trimtab.text import install_command

TESTED_VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}


def missing_engine(engine: str, error: ImportError) -> ImportError:
    """Return the error for an engine that cannot be imported: not installed, or of an unsupported version."""
    try:
        found = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return ImportError(
            f"trimtab.engines.{engine} needs {engine}, which is not installed: {install_command(extra=engine)} "
            f"(tested with {engine} {TESTED_VERSIONS[engine]})"
        )
    return ImportError(
        f"trimtab.engines.{engine} cannot use {engine} {found}: {error}. It was tested with {engine} "
        f"{TESTED_VERSIONS[engine]}: {install_command(f'{engine}=={TESTED_VERSIONS[engine]}')}"
    )


def check_version(engine: str) -> None:
    """Warn if the installed version of an engine is not the tested one."""
    found, tested = importlib.metadata.version(engine), TESTED_VERSIONS[engine]
    if found != tested:
        warnings.warn(
            f"trimtab.engines.{engine} was tested with {engine} {tested}; this is {found}. If it misbehaves: "
            f"{install_command(f'{engine}=={tested}')}",
            stacklevel=2,
        )
