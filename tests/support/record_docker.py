"""Records what Docker's client asks of the engine for the commands of a box, and what it says itself.

``python -m tests.support.record_docker OUT [IMAGE]`` needs an engine that answers at /var/run/docker.sock, or
at the socket that DOCKER_HOST names, with the image. tests/isolation/test_containers.py reads the file OUT.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import forgeasync as fa
from forgeasync.isolation import exec_command, kill_command, open_command, remove_command, run_command

NAME = "forgeasync-recorded"
_ID = re.compile("[0-9a-f]{64}")
NO_MOUNT = {"/no/such/folder": "/data"}
SECTION = fa.Docker(
    image="python:3.11-slim",
    memory_mib=100,
    disk_mib=16,
    max_files=77,
    max_processes=9,
    max_open_files=33,
    cpu_s=5,
    mounts={"/usr": "/data"},
    env={"A": "b c"},
)


def commands(section: fa.Docker) -> dict[str, list[str]]:
    """The commands of a box's life, by name, in the order to run them."""
    return {
        "run": run_command("docker", section, NAME),
        "open": open_command("docker", NAME),
        "exec": exec_command("docker", NAME, ["sh", "-c", "echo out; exit 4"]),
        "kill": kill_command("docker", NAME),
        "remove": remove_command("docker", NAME),
        "run without mount": run_command("docker", section.model_copy(update={"mounts": NO_MOUNT}), NAME),
        "exec without container": exec_command("docker", NAME, ["true"]),
    }


class Recorder:
    """Passes connections on to the engine and keeps what the client sends."""

    def __init__(self, engine: str, path: str) -> None:
        self._engine = engine
        self._sent: list[bytearray] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def take(self) -> list[dict[str, Any]]:
        """The requests since the last call: method and path without the version, JSON body."""
        sent, self._sent = self._sent, []
        return [request for data in sent for request in requests_of(bytes(data))]

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            engine = socket.socket(socket.AF_UNIX)
            engine.connect(self._engine)
            self._sent.append(kept := bytearray())
            for source, target, copy in ((client, engine, kept), (engine, client, bytearray())):
                threading.Thread(target=pump, args=[source, target, copy], daemon=True).start()


def pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    # Either side may be gone first.
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            kept += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def requests_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *headers = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in headers)}
        size = int(fields.get("content-length", 0))
        body, data = data[:size], data[size:]
        # Asked ahead of every command: who answers, in which version.
        if path != "/_ping":
            _, _, plain = path.removeprefix("/v").partition("/")
            asked = _ID.sub("ID", f"{method} /{plain}")
            found.append({"asked": asked, "body": _set_fields(json.loads(body)) if body else {}})
    return found


def _set_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Without what the client leaves at zero, nothing or false."""
    fields = {name: _set_fields(value) if isinstance(value, dict) else value for name, value in body.items()}
    return {name: value for name, value in fields.items() if value and value != [0, 0]}


def main(out: Path, image: str) -> None:
    engine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(engine, path := f"{folder}/socket")
        environment = os.environ | {"DOCKER_HOST": f"unix://{path}"}
        versions = subprocess.check_output(
            ["docker", "version", "--format", "{{.Server.Version}}, API {{.Server.APIVersion}}"], text=True
        )
        for name, command in commands(SECTION.model_copy(update={"image": image})).items():
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            recorded[name] = {
                "command": [SECTION.image if one == image else one for one in command],
                "exit_code": ran.returncode,
                "stderr": ran.stderr.splitlines(),
                "requests": recorder.take(),
            }
    text = json.dumps({"engine": versions.strip(), "commands": recorded})
    # A command a line, so that changes can be read.
    text = text.replace(json.dumps(image), json.dumps(SECTION.image)).replace('}]}, "', '}]},\n "')
    out.write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else SECTION.image)
