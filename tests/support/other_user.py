"""Runs a module of the tests as nobody, whose processes have no privileges, or as a root that lacks some."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_OPEN_HOME = """
cd {home} && mount -t tmpfs -o mode=755 none {closed} && mkdir -p {home} && mount -c --bind . {home} && cd /
"""
"""Where root's own folder is closed and has the Python in it: open the way to it, in a mount namespace."""


def why_not() -> str | None:
    """Why this process cannot start others as nobody; None if it can."""
    if os.geteuid() != 0:
        return "only root can become nobody; the tests as this user run"
    for program in ("unshare", "setpriv", "mount"):
        if shutil.which(program) is None:
            return f"needs {program} of util-linux"
    return None


def run_as_nobody(module: str, *arguments: str) -> str:
    """Run ``python -m module`` as nobody; its standard output."""
    prefix = Path(sys.base_prefix).resolve()
    closed = next((one for one in reversed(prefix.parents) if not one.stat().st_mode & 0o001), None)
    way = _OPEN_HOME.format(home=prefix, closed=closed) if closed is not None else ""
    become = 'exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all "$@"'
    return _run(
        [
            *("unshare", "-m", "--propagation", "private", "sh", "-ec", f"{way}\n{become}", "sh"),
            *(sys.executable, "-m", module, *arguments),
        ]
    )


def run_as_lesser_root(module: str, *arguments: str) -> str:
    """Run ``python -m module`` as root without CAP_NET_ADMIN; its standard output."""
    command = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]
    return _run([*command, sys.executable, "-m", module, *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
