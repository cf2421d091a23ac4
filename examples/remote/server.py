"""A remote environment in plain Python: no package of forgeasync, and none of anybody else (docs/remote.md).

    python examples/remote/server.py PORT

The agent asks the model twice. The score is the number of different characters in both answers.
"""

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def ask(episode: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """Sample the model's next turn, as with any endpoint of Chat Completions."""
    request = urllib.request.Request(
        f"{episode['base_url']}/chat/completions",
        data=json.dumps({"model": episode["model"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def run(episode: dict[str, Any]) -> dict[str, Any]:
    """Run one episode to its end; the result is the reply."""
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
            # The session refuses a turn: no room for it, too many turns, or the episode is over.
            self.reply({"ending": "environment_crash", "problem": error.read().decode()})

    def do_DELETE(self) -> None:
        """Cancelled. The episode ends by itself: the session refuses its next turn."""
        self.reply({})

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for every request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
