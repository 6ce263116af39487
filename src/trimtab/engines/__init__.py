"""The same objectives inside other trainers: `trimtab.engines.trl` and `trimtab.engines.verl`.

Here: which versions of the engines were tested, and what to tell the user of another one or of none. Nothing heavy is
imported, since verl's plug-in needs it in every process.
"""

from __future__ import annotations

import importlib.metadata
import warnings

from trimtab.text import install_command

TESTED_VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}
# verl's name for the agent loop with trimtab's tools, the setting to choose it with, and the key of verl's `extra_info`
# in which the loop passes on the text to grade.
AGENT_LOOP, AGENT_LOOP_KEY = "trimtab_tool_agent", "actor_rollout_ref.rollout.agent.default_agent_loop"
LAST_MESSAGE = "last_message"
# The agent loop that runs an agent of the user's own, and the key of what happened in its rollout.
OWN_AGENT_LOOP, AGENT_STATS = "trimtab_agent", "trimtab_agent_stats"


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
    found = importlib.metadata.version(engine)
    tested = TESTED_VERSIONS[engine]
    if found != tested:
        warnings.warn(
            f"trimtab.engines.{engine} was tested with {engine} {tested}; this is {found}. If it misbehaves: "
            f"{install_command(f'{engine}=={tested}')}",
            stacklevel=2,
        )
