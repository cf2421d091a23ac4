"""Serves the page and what it asks, to browsers of this machine."""

import asyncio
import errno
import signal
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from forgeasync.viewer.answers import NotThere
from forgeasync.viewer.questions import BadQuestion, Parameters, question_of
from forgeasync.viewer.run_reader import RunReader
from forgeasync.viewer.visible_values import shown
from forgeasync.viewer.watcher import Watcher

HOST = "127.0.0.1"

OWN_NAMES = frozenset({"127.0.0.1", "localhost"})
"""What a browser calls this machine. A page of others that has its own name lead here calls it otherwise."""

HEADERS = {
    # No script, style or address but our own: what a model wrote can do nothing even where it became markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PortTaken(ValueError):
    """Another program listens there; the text says what to do."""


def application(watcher: Watcher) -> web.Application:
    """The routes, without a port."""
    app = web.Application(middlewares=[_guard])
    pages = _static_files()

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        if name not in pages:
            return _problem(404, f"there is no /{name[:40]}")
        content_type, body = pages[name]
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    async def answer(request: web.Request) -> web.Response:
        given = {name: request.query.getall(name) for name in request.query}
        try:
            question = question_of(request.match_info["name"], Parameters(given))
            # In a thread: the readers may be busy for some milliseconds, and a file system for longer.
            found = await asyncio.to_thread(watcher.ask, question)
        except BadQuestion as error:
            return _problem(400, str(error))
        except NotThere as error:
            return _problem(404, str(error))
        body = msgspec.json.encode(shown({**found, "failure": watcher.failure}))
        return web.Response(body=body, content_type="application/json")

    app.router.add_get("/", page)
    app.router.add_get("/api/{name}", answer)
    app.router.add_get("/{name}", page)
    return app


async def serve(
    runs: Sequence[RunReader], port: int, say: Callable[[str], None], *, is_over: asyncio.Event
) -> None:
    """Serve until ``is_over``; ``say`` is told the address. Port 0 takes any that is free.

    Raises:
        PortTaken: another program has the port.
    """
    with Watcher(runs) as watcher:
        runner = web.AppRunner(application(watcher), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, HOST, port).start()
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                what = "is taken" if error.errno == errno.EADDRINUSE else "is not for this user"
                raise PortTaken(
                    f"--port = {port}: {what}; give another one, or 0 for any that is free"
                ) from None
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
    """Refuse who does not call this machine by its name, and give every answer its headers."""
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
    """The page's files by name, with their types: read once, so that no address leads to another file."""
    found = {}
    for file in (files("forgeasync.viewer") / "static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[file.name] = (_TYPES[suffix], file.read_bytes())
    return found
