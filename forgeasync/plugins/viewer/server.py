"""Serves the page and its API to browsers on this machine, and reads the runs' files meanwhile."""

import asyncio
import errno
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from forgeasync.plugins.viewer.api import Answer, BadQuestion, NotThere, Parameters, answer, shown
from forgeasync.plugins.viewer.run_reader import RunReader

HOST = "127.0.0.1"

OWN_NAMES = frozenset({"127.0.0.1", "localhost"})
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

LOOK_S = 1.0
"""Seconds between two checks of files that have nothing new."""

YIELD_S = 0.001
"""Pause after a piece of a file, in which a waiting request gets the readers, in seconds."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_LOGGER = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PortInUse(ValueError):
    """Another program listens on the port; the text has a remedy."""


class _Watcher:
    """Reads the runs in a separate thread; ``ask`` may be called from any thread."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._failure: str | None = None
        """Why the thread stopped reading; None while it reads."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="viewer-reading", daemon=True)

    def ask(self, name: str, given: Parameters) -> Answer:
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
            self._is_over.wait(YIELD_S if is_new else LOOK_S)

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
            found = await asyncio.to_thread(watcher.ask, request.match_info["name"], given)
        except BadQuestion as error:
            return _problem(400, str(error))
        except NotThere as error:
            return _problem(404, str(error))
        return web.Response(body=msgspec.json.encode(shown(found)), content_type="application/json")

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
    if urlsplit(f"//{request.headers.get('Host', '')}").hostname not in OWN_NAMES:
        response: web.StreamResponse = _problem(
            403, f"ask by one of the names {', '.join(sorted(OWN_NAMES))}"
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
