"""The backend of a ``sandbox`` section, and whether it works here."""

import asyncio
import concurrent.futures
from collections.abc import Iterator

from forgeasync.config import Bubblewrap, Docker, Podman, PythonSandbox, SandboxSection, UnsafeSubprocess
from forgeasync.environments.sandboxes.backend import SandboxBackend
from forgeasync.environments.sandboxes.bubblewrap import BubblewrapBackend
from forgeasync.environments.sandboxes.containers import ContainerBackend
from forgeasync.environments.sandboxes.results import SandboxError, SandboxUnavailable
from forgeasync.environments.sandboxes.unsafe import UnsafeBackend
from forgeasync.schema import Problem, load_code

_TRIAL_LIMIT_S = 30.0
_TRIAL_TEXT = "ready"

_OTHERS = (
    "sandbox.kind: docker and podman use containers instead; unsafe isolates nothing, for code that you trust"
)


def build_backend(section: SandboxSection) -> SandboxBackend:
    """Return the backend of a section, not started.

    Raises:
        SandboxUnavailable: the user's own class does not exist, cannot be called or is no backend.
    """
    match section:
        case Bubblewrap():
            return BubblewrapBackend(section)
        case Docker() | Podman():
            return ContainerBackend(section)
        case UnsafeSubprocess():
            return UnsafeBackend(section)
        case PythonSandbox():
            return _build_own(section)


def _build_own(section: PythonSandbox) -> SandboxBackend:
    try:
        built = load_code(section)(**section.options)
    except Exception as error:
        # Whatever the user's class raises while it is built is for the user to see.
        raise SandboxUnavailable(f"{section.factory}: {error}") from error
    if not isinstance(built, SandboxBackend):
        raise SandboxUnavailable(
            f"{section.factory} made a {type(built).__name__}; must be derived from forgeasync.SandboxBackend"
        )
    return built


def check_sandbox(section: SandboxSection) -> Iterator[Problem]:
    """Start a box, run a command in it and end it: at most one problem, with what to do about it.

    Blocks for as long as a box takes to start. Imports and runs the user's code.
    """
    # In a thread of its own, since the caller may be in an event loop.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        problem = thread.submit(lambda: asyncio.run(_try(section))).result()
    if problem is not None:
        field, value = "sandbox.kind", section.kind
        if isinstance(section, PythonSandbox):
            field, value = "sandbox.factory", section.factory
        yield Problem(field=field, value=value, remedy=problem)


async def _try(section: SandboxSection) -> str | None:
    backend: SandboxBackend | None = None
    try:
        backend = build_backend(section)
        await backend.start(None)
        result = await backend.exec(["sh", "-c", f"printf {_TRIAL_TEXT}"], timeout_s=_TRIAL_LIMIT_S)
        if result.stdout != _TRIAL_TEXT:
            text = (result.stderr or result.stdout).strip()[:300]
            return f"a box runs no commands here (exit code {result.exit_code}): {text}"
    except SandboxError as error:
        return str(error) if isinstance(section, PythonSandbox) else f"no box works here: {error}; {_OTHERS}"
    except Exception as error:
        if not isinstance(section, PythonSandbox):
            raise
        # Whatever the user's backend raises is for the user to see.
        return f"raised {type(error).__name__}: {error} in a trial"
    finally:
        if backend is not None:
            await backend.close()
    return None


def sandbox_warning(section: SandboxSection) -> str | None:
    """Return what a run has to say in red about its sandbox; None if there is nothing to say."""
    if isinstance(section, UnsafeSubprocess):
        return (
            "sandbox.kind: unsafe isolates nothing. What the model writes runs as plain processes of this "
            "user: it can read, change, delete and send everything that this user can."
        )
    return None
