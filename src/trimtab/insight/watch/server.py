"""The server of `trimtab watch`: the page, its data, and a stream of what is new (server-sent events)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trimtab.insight.report.curves import points_per_curve
from trimtab.insight.report.embed import safe_json
from trimtab.insight.report.page import joined_script, page, policy
from trimtab.insight.watch import live_data
from trimtab.insight.watch.guard import Guard
from trimtab.insight.watch.responses import export_lines, newest_samples, parse_filter, response_table
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.loopback import quiet_server
from trimtab.record import LAST_STEP, RecordError
from trimtab.text import shown

SCRIPTS = ("server.js", "responses.js", "live.js")
STYLE = "live.css"
LOOK_SECONDS = 1.4  # from one look at the files to the next, while a page is open
ALIVE_SECONDS = 10.0  # after which a stream says that it is still there
LOOK_SHARE = 0.05  # of a core, at most, that looking may take
MOST_CONNECTIONS = 64
KEEP_ALIVE_SECONDS = 75
STOP_SECONDS = 4  # that open pages get to hear how the run ended
MOST_STEPS_KEPT = 6  # answers about steps, of 8 MB each at most
JSON = "application/json"
CPU_HEADER = "x-cpu-milliseconds"

Work = Callable[[], Any]


class WatchServer:
    """Serves some runs to whoever has the token. It looks at their files only while a page is open."""

    def __init__(self, runs: Sequence[WatchedRun], token: str) -> None:
        self.runs = list(runs)
        self.app = Guard(self._app(), token)
        self.server: Any = quiet_server(
            self.app,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        # Reading tokens takes seconds, and must not delay what is new.
        self._looking = ThreadPoolExecutor(1, "trimtab-watch")
        self._reading = ThreadPoolExecutor(1, "trimtab-tokens")
        self._looked = (0.0, 0.0)  # when the last look ended, and the seconds it took
        self._steps: dict[tuple[int, int, int, int | None], str] = {}

    async def serve(self, listener: Any) -> None:
        """Serve until the process is told to stop."""
        first = asyncio.ensure_future(self.look())  # of a long run it takes a second, before the page is opened
        try:
            await self.server.serve(sockets=[listener])
        finally:
            first.cancel()
            self._looking.shutdown(wait=False, cancel_futures=True)
            self._reading.shutdown(wait=False, cancel_futures=True)

    def _app(self) -> Starlette:
        run, step = "/runs/{run:int}", "/runs/{run:int}/steps/{step:int}"
        routes = {
            "/": self._page,
            "/data": self._data,
            "/events": self._events,
            "/groups": self._groups,
            f"{run}/overview": self._overview,
            f"{run}/curves": self._curves,
            f"{run}/tokens": self._tokens,
            f"{run}/samples": self._samples,
            f"{run}/responses": self._responses,
            f"{run}/export": self._export,
            step: self._step,
            step + "/{response:int}": self._step,
            "/favicon.ico": self._nothing,
        }

        async def failed(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                return PlainTextResponse("There is nothing at this address.", error.status_code)
            return PlainTextResponse(str(error)[:1_000], 400)

        return Starlette(
            routes=[Route(path, handler, methods=["GET"]) for path, handler in routes.items()],
            exception_handlers={
                HTTPException: failed, ValueError: failed, RecordError: failed, LookupError: failed, OSError: failed
            },
        )  # fmt: skip

    async def look(self) -> None:
        """Read what is new in all runs, unless that was done a moment ago."""
        ended, took = self._looked
        if time.monotonic() - ended >= min(LOOK_SECONDS, 0.2 + took / LOOK_SHARE):
            await asyncio.get_running_loop().run_in_executor(self._looking, self._look)

    def _look(self) -> None:
        began = time.monotonic()
        for run in self.runs:
            run.poll()
        self._looked = (time.monotonic(), time.monotonic() - began)

    async def _in(self, threads: ThreadPoolExecutor, work: Work) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def _answer(self, threads: ThreadPoolExecutor, work: Work) -> Response:
        """Return what `work` gives as JSON, and the CPU time it took: the page asks less often for what takes more."""

        def timed() -> tuple[str, float]:
            began = time.thread_time()
            return safe_json(work()), time.thread_time() - began

        text, seconds = await self._in(threads, timed)
        return Response(text, media_type=JSON, headers={CPU_HEADER: f"{1000 * seconds:.1f}"})

    def _run(self, request: Request) -> tuple[int, WatchedRun]:
        number = request.path_params["run"]
        if number >= len(self.runs):
            raise HTTPException(404)
        return number, self.runs[number]

    async def _page(self, request: Request) -> Response:
        await self.look()
        data = await self._in(self._looking, lambda: live_data.page_json(self.runs))
        text = "".join(page(data["title"], data, live=page_files()))
        rules = policy(joined_script(scripts()), live=True) + "; frame-ancestors 'none'"
        return Response(text, media_type="text/html", headers={"content-security-policy": rules})

    async def _data(self, request: Request) -> Response:
        await self.look()
        return await self._answer(self._looking, lambda: live_data.page_json(self.runs))

    async def _overview(self, request: Request) -> Response:
        _, run = self._run(request)
        points = points_per_curve(len(self.runs))
        return await self._answer(self._looking, lambda: live_data.overview_json(run, points))

    async def _curves(self, request: Request) -> Response:
        _, run = self._run(request)
        limits = _limits(request)
        if limits is None:
            raise ValueError("first and last are missing: they are the steps between which the curves are wanted")
        return await self._answer(self._looking, lambda: live_data.zoom_json(run, *limits))

    async def _groups(self, request: Request) -> Response:
        limits = _limits(request)
        return await self._answer(self._looking, lambda: live_data.groups_zoom_json(self.runs, limits))

    async def _samples(self, request: Request) -> Response:
        _, run = self._run(request)
        return await self._answer(self._reading, lambda: newest_samples(run))

    async def _responses(self, request: Request) -> Response:
        _, run = self._run(request)
        wanted = parse_filter(request.query_params)
        return await self._answer(self._reading, lambda: response_table(run, wanted))

    async def _export(self, request: Request) -> Response:
        _, run = self._run(request)
        lines = export_lines(run, parse_filter(request.query_params))
        # The next line in one thread, as everything that reads tokens, so that nothing else waits for all of them.
        return StreamingResponse(self._drain(lines), media_type="application/x-ndjson")

    async def _drain(self, lines: Iterable[str]) -> AsyncIterator[str]:
        iterator = iter(lines)
        while (line := await self._in(self._reading, lambda: next(iterator, None))) is not None:
            yield line

    async def _step(self, request: Request) -> Response:
        number, run = self._run(request)
        step, only = request.path_params["step"], request.path_params.get("response")
        if step > LAST_STEP or (only or 0) > LAST_STEP:
            raise HTTPException(404)
        step = run.nearest_step(step)
        key = (number, run.generation, step, only)
        if key not in self._steps:
            text = await self._in(self._reading, lambda: live_data.step_json(run, step, str(number), only))
            while len(self._steps) >= MOST_STEPS_KEPT:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = text
        return Response(self._steps[key], media_type=JSON)

    async def _tokens(self, request: Request) -> Response:
        _, run = self._run(request)
        return await self._answer(self._reading, lambda: live_data.token_statistics_json(run))

    async def _nothing(self, request: Request) -> Response:
        return Response(status_code=204)

    async def _events(self, request: Request) -> Response:
        known = _positions(request.query_params.get("known", ""), len(self.runs))
        return StreamingResponse(self._stream(known), media_type="text/event-stream")

    async def _stream(self, known: list[live_data.Position]) -> AsyncIterator[str]:
        """Yield an event for everything new, a comment now and then, and a last event when the server ends."""
        said = [""] * len(self.runs)
        spoke = 0.0
        while True:
            ending = self.server.should_exit
            if ending:
                self._looked = (0.0, 0.0)
            await self.look()
            for number, run in enumerate(self.runs):
                lacking = partial(live_data.growth_since, run, known[number], said[number])
                grown, said[number] = await self._in(self._looking, lacking)
                if grown is not None:
                    known[number] = grown["position"]
                    spoke = time.monotonic()
                    yield f"event: growth\ndata: {safe_json({'run': number, **grown})}\n\n"
            if ending:
                yield "event: end\ndata: {}\n\n"
                return
            if time.monotonic() - spoke > ALIVE_SECONDS:
                spoke = time.monotonic()
                yield ": still here\n\n"
            # In parts, so that a server that is told to stop ends its streams at once.
            deadline = time.monotonic() + LOOK_SECONDS
            while time.monotonic() < deadline and not self.server.should_exit:
                await asyncio.sleep(0.25)


@cache
def page_files() -> Mapping[str, str]:
    """Return the scripts and the style that a live page has besides a report's."""
    folder = resources.files("trimtab.insight.watch") / "page"
    return {name: (folder / name).read_text(encoding="utf-8") for name in (*SCRIPTS, STYLE)}


@cache
def scripts() -> tuple[str, ...]:
    """Return the scripts that a live page has besides a report's."""
    return tuple(page_files()[name] for name in SCRIPTS)


def _limits(request: Request) -> tuple[int, int] | None:
    """Return the steps `first` and `last` of a request."""
    given = [request.query_params.get(name) for name in ("first", "last")]
    if given == [None, None]:
        return None
    if any(each is None or not each.isdecimal() or len(each) > 10 for each in given):
        raise ValueError(f"first and last are {shown(given)}; both must be steps")
    return int(str(given[0])), min(int(str(given[1])), LAST_STEP)


def _positions(text: str, runs: int) -> list[live_data.Position]:
    """Return how far a page is with each run, as it says; from the beginning if it does not say so."""
    try:
        found = json.loads(text[:10_000])
        positions = [tuple(int(value) for value in each) for each in found]
    except (ValueError, TypeError, OverflowError, RecursionError):  # infinite, or nested thousands deep
        positions = []
    if len(positions) != runs or any(len(each) != 3 for each in positions):
        return [(-1, 0, 0)] * runs  # another generation than any run has: the page loads all of it
    return [(each[0], each[1], each[2]) for each in positions]
