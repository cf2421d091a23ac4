"""A remote environment with the standard library only (docs/remote.md).

    python examples/remote/server.py PORT

An episode has two turns. The score is the number of different characters in both answers.
"""

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def ask(episode: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """Return the model's next turn, from the session's Chat Completions endpoint."""
    request = urllib.request.Request(
        f"{episode['base_url']}/chat/completions",
        data=json.dumps({"model": episode["model"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def run(episode: dict[str, Any]) -> dict[str, Any]:
    """Run one episode and return the reply to its request."""
    messages = [{"role": "user", "content": episode["task"]["prompt"]}]
    first = ask(episode, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "4 - 5 ="}]
    second = ask(episode, messages)
    score = float(len(set(first + second)))
    return {"score": score, "is_correct": second == episode["task"]["answer"], "parts": {"turns": 2.0}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply({"status": "ok"})

    def do_POST(self) -> None:
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.reply(run(episode))
        except urllib.error.HTTPError as error:
            # The session has refused a turn: the context is full, there were too many turns, or the episode
            # has ended.
            self.reply({"ending": "environment_crash", "problem": error.read().decode()})

    def do_DELETE(self) -> None:
        """Accept a cancellation; the episode ends by itself, because the session refuses its next turn."""
        self.reply({})

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Suppress the log line of each request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
