"""Shows what a launcher would submit, without submitting: Monarch's jobs run up to the last call.

Slurm's and ssh's commands are replaced by ones that write down what they are given, Kubernetes' API by a
server on this machine that does the same. So what is shown is what the installed Monarch sends.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml

from forgeasync.config import (
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RunConfig,
    SlurmLauncher,
    SshLauncher,
    num_hosts,
)
from forgeasync.launch.jobs import HostRole, build_job, build_kubernetes_job, mesh_name

PLANNED_LOGS = "runs/<name>-<time>/logs"
"""Log folder of a run without ``run_dir``."""

COMMAND_DEADLINE_S = 30.0
"""Seconds for a command that only writes a file."""

_WRITES_DOWN = """#!{python}
import os, pathlib, shlex, sys
folder = pathlib.Path({folder!r})
text = sys.stdin.read() if {reads_stdin} else shlex.join(["ssh", *sys.argv[1:]])
unfinished = folder / f".{{os.getpid()}}"
unfinished.write_text(text)
unfinished.rename(folder / str(os.getpid()))
print("Submitted batch job 0")
"""


def render_launch(config: RunConfig) -> str | None:
    """The text that starts the hosts of a checked config: a script, commands or manifests; None: locally."""
    launcher = config.launcher
    match launcher:
        case LocalLauncher():
            return None
        case ProcessLauncher():
            return f"{_count_processes(launcher)} host processes on this machine"
        case SshLauncher():
            return "\n".join(_commands(config, "ssh", num_commands=_count_processes(launcher)))
        case SlurmLauncher():
            (script,) = _commands(config, "sbatch", num_commands=1)
            _check_script(script)
            return script
        case KubernetesLauncher():
            return yaml.safe_dump_all(_manifests(config, launcher), sort_keys=False)


def _count_processes(launcher: ProcessLauncher | SshLauncher) -> int:
    counts = num_hosts(launcher)
    return counts.trainer + counts.generators


def _commands(config: RunConfig, command: str, *, num_commands: int) -> list[str]:
    """Return what the job passes to commands of this machine, in order: sbatch's input or ssh's arguments."""
    assert not isinstance(config.launcher, LocalLauncher)
    with tempfile.TemporaryDirectory() as scratch:
        written, commands, logs = (Path(scratch) / name for name in ("written", "bin", "logs"))
        for folder in (written, commands, logs):
            folder.mkdir()
        stand_in = commands / command
        text = _WRITES_DOWN.format(
            python=sys.executable, folder=str(written), reads_stdin=command == "sbatch"
        )
        stand_in.write_text(text)
        stand_in.chmod(0o700)
        with _first_in_path(commands):
            build_job(config.launcher, config.name, logs).apply()
            deadline = time.monotonic() + COMMAND_DEADLINE_S
            while len(files := [file for file in written.iterdir() if file.name[0] != "."]) < num_commands:
                assert time.monotonic() < deadline, f"{command} was called {len(files)} times"
                time.sleep(0.02)
        planned = PLANNED_LOGS if config.run_dir is None else str(Path(config.run_dir) / "logs")
        # Process ids rise: ssh is called for one host after the other.
        ordered = sorted(files, key=lambda file: int(file.name))
        return [file.read_text().replace(str(logs), planned) for file in ordered]


@contextlib.contextmanager
def _first_in_path(folder: Path) -> Iterator[None]:
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _check_script(script: str) -> None:
    """A shell can read it, and it has a worker for every node."""
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert read.returncode == 0, f"no shell script: {read.stderr}"


class _WritesDown(BaseHTTPRequestHandler):
    """Says that nothing exists yet, and keeps what is created."""

    server: "_ApiServer"

    def do_GET(self) -> None:
        self._answer(HTTPStatus.NOT_FOUND, {"kind": "Status", "code": 404})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.created.append(body)
        self._answer(HTTPStatus.CREATED, body)

    def _answer(self, status: HTTPStatus, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing on the terminal."""


class _ApiServer(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _WritesDown)
        self.created: list[dict[str, object]] = []


def _manifests(config: RunConfig, launcher: KubernetesLauncher) -> list[dict[str, object]]:
    """The MonarchMesh objects that the job creates."""
    from kubernetes.client import Configuration
    from monarch.job.kubernetes import KubeConfig

    counts = num_hosts(launcher)
    by_role = {HostRole.TRAINER: counts.trainer, HostRole.GENERATORS: counts.generators}
    meshes = {mesh_name(launcher, config.name, role): count for role, count in by_role.items()}
    with _ApiServer() as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        # Past a proxy that the environment may name.
        client = Configuration(host=f"http://127.0.0.1:{server.server_port}")
        client.proxy = None
        try:
            build_kubernetes_job(launcher, meshes, KubeConfig.from_config(client)).apply()
        finally:
            server.shutdown()
            serving.join()
        return server.created
