"""Serves the page and its HTTP API to browsers on this machine, and reads the runs' files meanwhile.

Answers are JSON types: ``/api/groups?run=0`` is ``groups``.
"""

import asyncio
import errno
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from forgeasync.buffer import DropReason
from forgeasync.observability import TOPICS, definition_of, visible
from forgeasync.plugins.viewer.groups import Fate, GroupHistories, GroupHistory
from forgeasync.plugins.viewer.processes import faults_answer, lanes_answer
from forgeasync.plugins.viewer.rollouts import NotFound, tokens_answer, worst_answer
from forgeasync.plugins.viewer.run_reader import MAIN_METRICS, RunClock, RunReader, status_of

MAX_GROUPS = 200
"""Maximum number of groups of one answer."""

MAX_WIDTH = 4096

MAX_DEPTH = 40
"""Maximum nesting of an answer; deeper parts are replaced by a message."""

MISSING = "(not there)"
"""Value shown for a key that a run's config does not have."""

_MAX_NUMBER = 10**17

Answer = dict[str, object]

E = TypeVar("E", bound=StrEnum)


class BadRequest(ValueError):
    """A parameter is missing or wrong; the text names it, its value and the allowed values."""


class Parameters:
    """The parameters of one URL: each name with all of its values."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values = values

    def _one(self, name: str) -> str | None:
        found = self._values.get(name, [])
        if len(found) > 1:
            raise BadRequest(f"{name} is given {len(found)} times; must be given once")
        return found[0] if found and found[0] != "" else None

    def optional(self, name: str, *, below: int = _MAX_NUMBER) -> int | None:
        """Return a non-negative integer; None if it is not given."""
        text = self._one(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 18 and int(text) < below):
            raise BadRequest(f"{name} = {text[:40]!r}; must be a whole number from 0 to {below - 1}")
        return int(text)

    def number(self, name: str, *, default: int, below: int = _MAX_NUMBER) -> int:
        """Return a non-negative integer, or the default if it is not given."""
        found = self.optional(name, below=below)
        return default if found is None else found

    def required(self, name: str) -> int:
        """Return a non-negative integer that must be given."""
        found = self.optional(name)
        if found is None:
            raise BadRequest(f"{name} is missing; must be a whole number from 0 to {_MAX_NUMBER - 1}")
        return found

    def choice(self, name: str, choices: type[E]) -> E | None:
        """Return one of a closed set of choices; None if it is not given."""
        text = self._one(name)
        if text is not None and text not in list(choices):
            raise BadRequest(f"{name} = {text[:40]!r}; must be one of {', '.join(choices)}")
        return None if text is None else choices(text)


def answer(runs: Sequence[RunReader], name: str, given: Parameters) -> Answer:
    """Answer a request from the part of the runs' files that was read so far.

    Raises:
        NotFound: there is no such request, or the run does not have the requested item.
        BadRequest: a parameter is wrong.
    """
    if name in _OF_ALL_RUNS:
        return _OF_ALL_RUNS[name](runs)
    if name in _OF_ONE_RUN:
        run = runs[given.number("run", default=0, below=len(runs))]
        return _OF_ONE_RUN[name](run, given)
    known = ", ".join((*_OF_ALL_RUNS, *_OF_ONE_RUN))
    raise NotFound(f"there is no /api/{name[:40]}; there are {known}")


def _runs(runs: Sequence[RunReader]) -> Answer:
    """Return the status and the reading progress of each run, and the definitions of the metrics shown."""
    found = {key: definition_of(key) for key in MAIN_METRICS}
    return {
        "runs": [{**status_of(run), "progress": run.progress} for run in runs],
        "meanings": {key: one.meaning for key, one in found.items() if one is not None},
    }


def _glossary(runs: Sequence[RunReader]) -> Answer:
    """Return all metrics that this version of forgeasync defines, by topic."""
    return {
        "topics": [
            {
                "heading": topic.heading,
                "note": topic.note,
                "metrics": [
                    {"key": one.key, "meaning": one.meaning, "when": one.when} for one in topic.metrics
                ],
            }
            for topic in TOPICS
        ]
    }


def _settings(runs: Sequence[RunReader]) -> Answer:
    """Return the configs: keys in which the runs differ, and all keys."""
    rows = {
        key: [run.settings.get(key) for run in runs]
        for key in dict.fromkeys(key for run in runs for key in run.settings)
    }
    return {
        "differing": {
            key: [MISSING if one is None else one for one in values]
            for key, values in rows.items()
            if len(set(values)) > 1
        },
        "all": rows,
    }


def _groups(run: RunReader, given: Parameters) -> Answer:
    """Return a page of the groups, newest first, and their number."""
    groups, clock = run.groups, RunClock(run.groups, run.metrics)
    found = groups.find(
        fate=given.choice("fate", Fate),
        reason=given.choice("reason", DropReason),
        step=given.optional("step"),
    )
    skip = given.number("skip", default=0)
    limit = given.number("limit", default=50, below=MAX_GROUPS + 1)
    return {
        "num_groups": len(found),
        "groups": [_history(groups, clock, one) for one in found[skip : skip + limit]],
    }


def _group(run: RunReader, given: Parameters) -> Answer:
    """Return one group: its histories, the other attempts at its prompt, and its rollouts."""
    group = given.required("group")
    groups, clock = run.groups, RunClock(run.groups, run.metrics)
    found, rollouts = groups.of_group(group), run.rollouts.find(group=group)
    if not found and not rollouts:
        raise NotFound(f"group = {group}: no line read so far names it; groups have numbers from 0 on")
    task = groups.task_of(found[0].prompt) if found else None
    attempts = groups.of_prompt(found[0].prompt) if found else []
    return {
        "group": group,
        "source": None if task is None else task[0],
        "task_id": None if task is None else task[1],
        "histories": [_history(groups, clock, one) for one in found],
        "attempts": [{"group": one.group, "attempt": one.attempt, "fate": one.fate} for one in attempts],
        **run.rollouts.rows(rollouts),
    }


def _history(groups: GroupHistories, clock: RunClock, one: GroupHistory) -> dict[str, object]:
    """Return one group as JSON types: its events in order, each with its time and the steps before it."""
    lines = [
        ("submitted", one.submitted_line),
        ("restored" if one.is_restored else "started", one.started_line),
        ("sampled", one.sampled_line),
        ("scored", one.scored_line),
        (one.fate if one.undone_line is None else "ended", one.ended_line),
        ("undone", one.undone_line),
    ]
    return {
        "group": one.group,
        "prompt": one.prompt,
        "attempt": one.attempt,
        "fate": one.fate,
        "reason": one.reason,
        "is_resubmitted": one.is_resubmitted,
        "step": one.step,
        "events": [
            {
                "what": what,
                "line": line,
                "num_steps_made": groups.step_before(line),
                "about_s": clock.about_s(line),
            }
            for what, line in lines
            if line is not None
        ],
    }


def _rollouts(run: RunReader, given: Parameters) -> Answer:
    """Return the stored rollouts of a step."""
    return run.rollouts.rows(run.rollouts.find(step=given.required("step")))


def _rollout(run: RunReader, given: Parameters) -> Answer:
    """Return one rollout with its texts."""
    return {"rollout": run.rollouts.whole(given.required("number"))}


def _tokens(run: RunReader, given: Parameters) -> Answer:
    """Return a page of the values of a rollout's tokens, or why there are none."""
    branch, skip = given.number("branch", default=0), given.number("skip", default=0)
    return tokens_answer(run.rollouts, run.tokens, given.required("number"), branch=branch, skip=skip)


def _worst(run: RunReader, given: Parameters) -> Answer:
    """Return the worst tokens of a step."""
    return worst_answer(run.rollouts, run.tokens, given.required("step"))


def _lanes(run: RunReader, given: Parameters) -> Answer:
    """Return the states of the processes as bars, over some steps or the whole run."""
    return lanes_answer(
        run.traces.lanes,
        first_step=given.optional("first"),
        last_step=given.optional("last"),
        width=max(given.number("width", default=400, below=MAX_WIDTH + 1), 1),
    )


def _faults(run: RunReader, given: Parameters) -> Answer:
    """Return the faults and recoveries, and the processes that the run lists."""
    return faults_answer(run.faults, run.run_dir.procs)


_OF_ALL_RUNS: dict[str, Callable[[Sequence[RunReader]], Answer]] = {
    "runs": _runs,
    "glossary": _glossary,
    "settings": _settings,
}

_OF_ONE_RUN: dict[str, Callable[[RunReader, Parameters], Answer]] = {
    "groups": _groups,
    "group": _group,
    "rollouts": _rollouts,
    "rollout": _rollout,
    "tokens": _tokens,
    "worst": _worst,
    "lanes": _lanes,
    "faults": _faults,
}


def escaped(value: object, depth: int = 0) -> object:
    """Return an answer with control and similar characters escaped, in keys too.

    A model wrote some of the texts, and they can appear in a fault or a log. No text may hide anything on the
    page, or reverse the direction of text.
    """
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, float | int) or value is None:
        return value
    if depth > MAX_DEPTH:
        return "(nested too deep to be shown)"
    if isinstance(value, dict):
        return {visible(str(key)): escaped(one, depth + 1) for key, one in value.items()}
    assert isinstance(value, list | tuple), f"an answer has {type(value).__name__}"
    return [escaped(one, depth + 1) for one in value]


HOST = "127.0.0.1"

ALLOWED_HOSTS = frozenset({"127.0.0.1", "localhost"})
"""Host names that requests may use. A foreign page whose name resolves to this machine uses another one."""

HEADERS = {
    # Allows only our own scripts, styles and addresses, so that a model's text can do nothing even as markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

POLL_S = 1.0
"""Seconds between two checks of files that have nothing new."""

YIELD_S = 0.001
"""Pause after a piece of a file, in which a waiting request gets the readers, in seconds."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_LOGGER = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PortInUse(ValueError):
    """Another program listens on the port; the text has a remedy."""


class _Watcher:
    """Reads the runs in a separate thread; ``answer`` may be called from any thread."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._failure: str | None = None
        """Why the thread stopped reading; None while it reads."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="viewer-reading", daemon=True)

    def answer(self, name: str, given: Parameters) -> Answer:
        """Answer from what was read so far; see ``answer`` for errors."""
        with self._lock:
            return {**answer(self._runs, name, given), "failure": self._failure}

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._lock:
                    # Read every run in turn, so that a long one does not delay the others.
                    is_new = any([run.read_some() for run in self._runs])
            except Exception as error:
                # A bug of the viewer: the page still shows what was read, and reports the failure.
                _LOGGER.exception("a run's files could not be read")
                self._failure = f"the viewer has stopped reading: {type(error).__name__}: {error}"
                return
            self._is_over.wait(YIELD_S if is_new else POLL_S)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._is_over.set()
        self._thread.join()


def application(runs: Sequence[RunReader]) -> web.Application:
    """Return the routes without a port; the runs are read from the app's startup to its cleanup."""
    app = web.Application(middlewares=[_guard])
    pages, watcher = _static_files(), _Watcher(runs)

    async def watching(_: web.Application) -> AsyncIterator[None]:
        watcher.start()
        yield
        watcher.stop()

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        if name not in pages:
            return _problem(404, f"there is no /{name[:40]}")
        content_type, body = pages[name]
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    async def api(request: web.Request) -> web.Response:
        given = Parameters({name: request.query.getall(name) for name in request.query})
        try:
            # Run in a thread: the readers can be busy for some milliseconds, and a file system for longer.
            found = await asyncio.to_thread(watcher.answer, request.match_info["name"], given)
        except BadRequest as error:
            return _problem(400, str(error))
        except NotFound as error:
            return _problem(404, str(error))
        return web.Response(body=msgspec.json.encode(escaped(found)), content_type="application/json")

    app.cleanup_ctx.append(watching)
    app.router.add_get("/", page)
    app.router.add_get("/api/{name}", api)
    app.router.add_get("/{name}", page)
    return app


async def serve(
    runs: Sequence[RunReader], port: int, say: Callable[[str], None], *, is_over: asyncio.Event
) -> None:
    """Serve until ``is_over``; ``say`` is called with the URL. Port 0 selects any free port.

    Raises:
        PortInUse: another program uses the port.
    """
    runner = web.AppRunner(application(runs), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            what = "is taken" if error.errno == errno.EADDRINUSE else "is not for this user"
            raise PortInUse(f"--port = {port}: {what}; give another one, or 0 for any that is free") from None
        say(f"http://{HOST}:{runner.addresses[0][1]}/")
        await is_over.wait()
    finally:
        await runner.cleanup()


def serve_until_stopped(runs: Sequence[RunReader], port: int, say: Callable[[str], None]) -> None:
    """Serve until this process gets SIGINT or SIGTERM; see ``serve``."""

    async def until_stopped() -> None:
        is_over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, is_over.set)
        await serve(runs, port, say, is_over=is_over)

    asyncio.run(until_stopped())


@web.middleware
async def _guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse requests with other host names than this machine's, and add the headers to every response."""
    if urlsplit(f"//{request.headers.get('Host', '')}").hostname not in ALLOWED_HOSTS:
        response: web.StreamResponse = _problem(
            403, f"use one of the names {', '.join(sorted(ALLOWED_HOSTS))}"
        )
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _problem(error.status, error.reason)
    response.headers.update(HEADERS)
    return response


def _problem(status: int, words: str) -> web.Response:
    return web.json_response({"error": words}, status=status)


def _static_files() -> dict[str, tuple[str, bytes]]:
    """Read the page's files once, by name and with their types, so that no URL leads to another file."""
    found = {}
    for file in (files("forgeasync.plugins.viewer") / "static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[file.name] = (_TYPES[suffix], file.read_bytes())
    return found
