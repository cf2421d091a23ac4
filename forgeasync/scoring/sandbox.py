"""The command line that runs a process of verifiers, in bubblewrap where that works."""

import functools
import logging
import os
import site
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forgeasync
from forgeasync.config import ScorerSection
from forgeasync.environments import own_mark
from forgeasync.isolation import HOW_TO_GET, bubblewrap_programs
from forgeasync.schema import Problem

logger = logging.getLogger(__name__)

TRIAL_LIMIT_S = 30.0
_SCRATCH_FOLDER = "/tmp"
_SCRATCH_BYTES = 4 * 2**20
"""matplotlib, which reasoning-gym imports, insists on a place to write to; an answer cannot write there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """Whether bubblewrap can be used here."""

    path: str | None
    """The path of its program; None where it cannot."""
    problem: str = ""
    """Why it cannot."""


def package_root() -> Path:
    """The folder that holds our package."""
    return Path(forgeasync.__path__[0]).resolve().parent


def python_path() -> str:
    """PYTHONPATH of a process of verifiers."""
    return os.pathsep.join([str(package_root()), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(scratch_folder: str = _SCRATCH_FOLDER) -> dict[str, str]:
    """All environment variables that a process of verifiers gets: no secret of the run is among them.

    Libraries may write to ``scratch_folder`` while they are imported; the default is the one in bubblewrap.
    """
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHASHSEED") if name in os.environ}
    # By its parent's mark a process is found, and ended, when its parent has been killed.
    return (kept | own_mark()) | {
        "HOME": scratch_folder,
        "MPLCONFIGDIR": scratch_folder,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": python_path(),
        # One thread: processes that fork must have no other.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def python_command(module_or_code: list[str]) -> list[str]:
    """Python in this environment; -P keeps the current folder off sys.path."""
    return [sys.executable, "-P", *module_or_code]


def bubblewrap_command(program: str) -> list[str]:
    """bubblewrap's part of a command: no network, no home, nothing but Python's own files, read-only."""
    command = [program, "--unshare-all", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    for folder in _system_folders():
        if folder.is_symlink():
            command += ["--symlink", os.readlink(folder), str(folder)]
        else:
            command += ["--ro-bind", str(folder), str(folder)]
    # Before Python's folders, which may lie below it.
    command += ["--size", str(_SCRATCH_BYTES), "--tmpfs", _SCRATCH_FOLDER]
    for folder in _python_folders():
        command += ["--ro-bind", str(folder), str(folder)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Last, so that folders can still be made to bind to: the root and /dev are in memory, and would take
    # files.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", _SCRATCH_FOLDER, "--"]


def _system_folders() -> list[Path]:
    return [path for name in ("usr", "bin", "lib", "lib32", "lib64") if (path := Path("/", name)).exists()]


def _python_folders() -> list[Path]:
    """Python's own folders, those that it imports from, and the package alone of what surrounds it."""
    root = package_root()
    # sys.path is not used: it may begin with the folder of a script, which would expose everything in it.
    variables = [os.environ.get(name, "").split(os.pathsep) for name in ("PYTHONPATH", "LD_LIBRARY_PATH")]
    listed = [Path(one) for names in (*variables, _user_site()) for one in names if one]
    wanted = [Path(sys.prefix), Path(sys.base_prefix), Path(forgeasync.__path__[0])]
    wanted += [path for path in listed if path.exists() and not root.is_relative_to(path.resolve())]
    executable = Path(sys.executable)
    while executable.is_symlink():
        wanted.append(executable.parent)
        executable = executable.parent / os.readlink(executable)
    wanted.append(executable.parent)
    both = {form for path in wanted for form in (Path(os.path.abspath(path)), path.resolve())}
    system = _system_folders()
    # Outer folders first: what is bound later lies over what was bound before.
    return sorted(path for path in both if not any(path.is_relative_to(one) for one in system))


def _user_site() -> list[str]:
    return [folder] if (folder := site.getusersitepackages()) in sys.path else []


@functools.cache
def find_bubblewrap() -> Bubblewrap:
    """Start Python with our package in every bubblewrap here until one works; once in a process."""
    problems = []
    for program in bubblewrap_programs():
        if (problem := _problem_of(program)) is None:
            return Bubblewrap(path=program)
        problems.append(problem)
    return Bubblewrap(path=None, problem="; ".join(problems) or "bubblewrap is not installed")


def _problem_of(program: str) -> str | None:
    trial = [*bubblewrap_command(program), *python_command(["-c", "import forgeasync.scoring.isolation"])]
    try:
        tried = subprocess.run(
            trial, env=environment(), capture_output=True, text=True, timeout=TRIAL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode == 0:
        return None
    lines = tried.stderr.strip().splitlines() or ["no message"]
    return f"{program} exited with {tried.returncode}: {lines[-1][:200]}"


def check_isolation(section: ScorerSection, bubblewrap: Bubblewrap) -> Iterator[Problem]:
    """Find a problem if answers would be verified behind weaker layers than the config accepts."""
    if bubblewrap.path is None and not section.allow_weaker_isolation:
        yield Problem(
            field="scorer.allow_weaker_isolation",
            value=False,
            remedy=f"answers are verified in bubblewrap, which does not work here ({bubblewrap.problem}): "
            f"{HOW_TO_GET}; or set it to true (in calls of math_reward: allow_weaker_isolation=True) to "
            "verify them behind the weaker layers that work here (docs/scoring.md)",
        )
