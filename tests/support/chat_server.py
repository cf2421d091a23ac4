"""A server of Chat Completions on this machine that answers as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Mapping[str, Any] | tuple[int, Mapping[str, Any]] | tuple[int, Mapping[str, str], str]
"""A body, a status with a body, or a status with headers and a body in letters."""


class ChatServer:
    """Keeps the requests; ``reply`` gets the body of each one and can be replaced at any time."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        num_at_once, lock, server = 0, threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                return None

            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "served", "object": "model"}]})

            def do_POST(self) -> None:
                nonlocal num_at_once
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.requests.append(body)
                    server.keys.append(self.headers["Authorization"])
                    num_at_once += 1
                    server.most_at_once = max(server.most_at_once, num_at_once)
                reply = server.reply(body)
                with lock:
                    num_at_once -= 1
                self._send(reply)

            def _send(self, reply: Reply) -> None:
                status, *headers, body = reply if isinstance(reply, tuple) else (200, reply)
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                try:
                    self.send_response(status)
                    for name, value in {"Content-Type": "application/json", **dict(*headers)}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client did not wait

        self._handler = Handler
        self._port = 0
        self.come_back()

    def come_back(self) -> None:
        """Serve, at the same address as before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def go_down(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[ChatServer]:
    """Serve until the body ends."""
    server = ChatServer(reply)
    try:
        yield server
    finally:
        server.go_down()


def completion(
    text: str | None,
    *,
    finish_reason: str = "stop",
    tool_calls: list[dict[str, Any]] | None = None,
    usage: tuple[int, int] | None = (7, 3),
    **more: object,
) -> dict[str, Any]:
    """The body of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text, **more}
    if tool_calls is not None:
        message["tool_calls"] = tool_calls
    body: dict[str, Any] = {
        "id": "1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "served",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if usage is not None:
        prompt, sampled = usage
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }
    return body


def call(name: str, arguments: str, *, number: int = 0) -> dict[str, Any]:
    """A call of a tool as a server writes it."""
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def error(status: int, message: str, code: str | None = None) -> tuple[int, dict[str, Any]]:
    """An answer with an error."""
    return status, {"error": {"message": message, "type": "invalid_request_error", "code": code}}
