"""The sandbox works where engines run tools: inside Ray's actors, each with a server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trimtab.tools import Sandbox, SandboxError

ray: Any = pytest.importorskip("ray", reason="Ray comes with verl")

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        with Sandbox(workers=2) as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore")
def test_actors_run_programs_and_sessions_at_all_walls(cluster: None, sandbox: Sandbox) -> None:
    class Tools:
        def __init__(self, sandbox: Any) -> None:
            self.sandbox = sandbox
            self.session = sandbox.session(timeout=60.0)

        def level(self) -> Any:
            return self.sandbox.probe.level

        def run(self, code: str, timeout: float) -> Any:
            return self.sandbox.run(code, timeout=timeout)

        def turn(self, code: str) -> Any:
            return self.session.run(code)

    actors = [ray.remote(Tools).options(max_concurrency=2).remote(sandbox) for _ in range(2)]
    assert ray.get([actor.level.remote() for actor in actors], timeout=600) == ["full", "full"]
    # Programs at once in both, one of which does not end by itself, and one that looks for Ray.
    endless = [actor.run.remote("while True:\n    pass", 1.0) for actor in actors]
    look = "import os, sympy\nprint(sympy.factorint(360), os.path.exists('/tmp/ray'), [n for n in os.environ if 'RAY' in n])"
    looks = [actor.run.remote(look, PATIENT) for actor in actors]
    assert [result.kind for result in ray.get(endless, timeout=600)] == ["timeout", "timeout"]
    assert [result.stdout for result in ray.get(looks, timeout=600)] == ["{2: 3, 3: 2, 5: 1} False []\n"] * 2
    for number, actor in enumerate(actors):
        assert ray.get(actor.turn.remote(f"x = {number}"), timeout=600).kind == "ok"
    turns = ray.get([actor.turn.remote("print(x)") for actor in actors], timeout=600)
    assert [result.stdout for result in turns] == ["0\n", "1\n"]
