"""A server of Chat Completions on this machine that answers as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Mapping[str, Any] | tuple[int, Mapping[str, Any]]
"""A body, or a status with a body."""


class ChatServer:
    """Keeps the requests; ``answer`` gets the body of each one."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._answer = answer
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                return None

            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "served", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(body)
                    outer.keys.append(self.headers.get("Authorization"))
                self._send(outer._answer(body))

            def _send(self, reply: Reply) -> None:
                status, body = reply if isinstance(reply, tuple) else (200, reply)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"


@contextmanager
def serving(answer: Callable[[Mapping[str, Any]], Reply]) -> Iterator[ChatServer]:
    """Serve until the body ends."""
    server = ChatServer(answer)
    thread = threading.Thread(target=server._server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join()


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
