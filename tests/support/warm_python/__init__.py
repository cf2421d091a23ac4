"""A Python that has imported torch, TorchTitan or vLLM when it starts, for tests to start programs with.

Importing them takes 3 to 9 s of a core, longer than most tests take for all else. ``warm_python()`` is the
path of a script that stands in for ``sys.executable``. Started as ``SCRIPT -m MODULE ...`` with one of the
modules that ``executable.py`` names, it asks a server of the test session for a fork that runs the module. It
passes signals on and ends as the fork ends; the fork dies with it. With any other arguments the real Python
takes its place. A fork sees the script as ``sys.executable``, so that what it starts is warm too: Monarch's
processes, for example.

    executable.py  what the script runs: standard library only
    server.py      the server: imports, and forks; it does nothing else and has a single thread
    fork.py        what a fork does before it runs the module
    call.py        such a module: runs a function that is pickled in a file
"""

import atexit
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.warm_python import executable
from tests.support.warm_python.executable import LINK

FOLDER = "FORGEASYNC_TESTS_WARM_PYTHON"
"""Variable with the folder of the server that processes of one test session share."""

ROOM_BYTES = 1 << 16
"""Room for the environment that a fork shows in /proc."""

REAL_PYTHON = str(Path(sys.prefix, "bin", "python"))
"""For programs that must not be warm; ``sys.executable`` is the warm Python in tests that start processes."""

_REPOSITORY = Path(__file__).parents[3]

_VLLM = (
    "forgeasync.generator.engine",
    "forgeasync.generator.episodes",
    # What vLLM imports with its first engine.
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.worker.cpu_worker",
    "pytest",
)

MODULES: dict[str, tuple[str, ...]] = {
    "torchtitan": (
        "torch._inductor.compile_fx",
        # Monarch imports them.
        "opentelemetry.metrics",
        "pyre_extensions",
        "forgeasync.scoring.judge",
        "forgeasync.scoring.reward_pool",
        "forgeasync.scoring.verifier_pool",
        "forgeasync.trainer.policy_trainer",
        # What TorchTitan and transformers import with their first model.
        "torchtitan.trainer",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.models.auto.tokenization_auto",
        "forgeasync.environments.environment",
        "forgeasync.environments.endpoint_agent",
        "forgeasync.environments.episodes",
        "forgeasync.environments.rendering",
        "forgeasync.environments.sessions.server",
        "forgeasync.plugins.serve.environment",
        "forgeasync.checkpoints",
        "forgeasync.config.load",
        "forgeasync.observability.console",
        "pytest",
    ),
    "vllm": _VLLM,
    # Engines in the form that they have on GPUs: Triton's kernels are interpreted.
    "vllm_of_gpus": (
        "tests.support.interpreted_triton",
        *_VLLM,
        "vllm.v1.worker.cpu.model_runner",
    ),
}
"""What each kind of fork has imported. vLLM changes torch for whoever imports it.

Nothing here may import Monarch, which starts threads when it is imported; a fork imports it in 0.3 s.
"""


def warm_python() -> str:
    """The script; starts the server of this session first, unless that was done."""
    return str(session_folder() / "bin" / "python")


def session_folder() -> Path:
    """The folder of this session's server, which is started if there is none."""
    given = os.environ.get(FOLDER)
    return Path(given) if given is not None else _start()


def wait_until_imported(*kinds: str) -> None:
    """Wait until forks of these kinds can be had at once.

    Limits on the time that a program takes to start should not count the first import.
    """
    for kind in kinds:
        with socket.socket(*LINK) as link:
            link.connect(str(session_folder() / kind))
            # Asks for nothing.
            link.shutdown(socket.SHUT_WR)
            link.recv(1)


def sessions_below(session: int) -> set[int]:
    """The process session, and those of all forks that its processes have started, directly or not.

    Every fork leads a session of its own, as it cannot be put into another process's.
    """
    folder = session_folder() / "sessions"
    found, new = set(), {session}
    while new:
        found |= new
        new = {int(file.name.split("-")[1]) for one in new for file in folder.glob(f"{one}-*")} - found
    return found


@functools.cache
def _start() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    (folder / "sessions").mkdir()
    _write_script(folder / "bin")
    # This process alone has the other end: the servers end with it.
    life, _ = os.pipe()
    for kind in MODULES:
        with socket.socket(*LINK) as listener, (folder / f"{kind}.log").open("w") as log:
            # Here, not in the server: processes can connect at once, and wait.
            listener.bind(str(folder / kind))
            listener.listen(128)
            numbers = (life, listener.fileno())
            subprocess.Popen(
                [REAL_PYTHON, "-m", f"{__name__}.server", kind, str(folder), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_REPOSITORY,
                # Else numpy would start threads as it is imported. The room is last: what it shows counts.
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WARM_ROOM": "_" * ROOM_BYTES},
                pass_fds=numbers,
            )
    os.close(life)
    os.environ[FOLDER] = str(folder)
    return folder


def _write_script(folder: Path) -> None:
    """Write the script into a folder like that of the real Python, whose neighbors some programs look for."""
    folder.mkdir()
    for one in Path(REAL_PYTHON).parent.iterdir():
        if one.name != "python":
            (folder / one.name).symlink_to(one)
    script = folder / "python"
    python, asks = shlex.quote(REAL_PYTHON), shlex.quote(executable.__file__)
    # A sandbox sees this folder and the real Python, but not the tests; nothing in one is warm.
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then exec {python} -IS {asks} "$0" "$@"; fi\nexec {python} "$@"\n'
    )
    script.chmod(0o755)
