"""Chooses where the procs of a role run, and in what environment."""

import asyncio
import itertools
from collections.abc import Collection, Iterator

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

from forgeasync.launch.bootstrap_main import GPUS_VARIABLE
from forgeasync.launch.forking.client import OF_A_PROC, fork_server, has_gpus, own_life
from forgeasync.launch.forking.import_sets import ImportSet


class GpuAllocator:
    """Hands out the GPUs of a host in order, but not those that are reserved; without any, nothing.

    Raises:
        ValueError: a role asks for more GPUs than are left.
    """

    def __init__(self, num_gpus: int, reserved: Collection[int] = ()) -> None:
        self._num_gpus = num_gpus
        self._left = [gpu for gpu in range(num_gpus) if gpu not in reserved]

    def take(self, num_gpus: int, *, role: str) -> list[int]:
        if self._num_gpus == 0:
            return []
        if num_gpus > len(self._left):
            num_left = len(self._left)
            raise ValueError(
                f"{role} needs {num_gpus} GPUs, but {num_left} of this host's {self._num_gpus} are left"
            )
        taken, self._left = self._left[:num_gpus], self._left[num_gpus:]
        return taken


def _environment(gpus: list[int]) -> dict[str, str]:
    environment = {GPUS_VARIABLE: ",".join(map(str, gpus))}
    return environment if gpus else environment | OF_A_PROC


def preimport() -> None:
    """Runs first in every proc: torch is imported once, before messages that need it arrive concurrently."""
    import torch as torch


async def until_imported(import_sets: Collection[ImportSet]) -> None:
    """Wait until what procs of this machine are forked from has imported these sets: Monarch 0.7 waits no
    longer than 30 s for a proc that it starts."""
    if has_gpus():
        return
    server = fork_server(tuple(import_sets))
    await asyncio.gather(*(asyncio.to_thread(server.wait, one) for one in import_sets))


def _bootstrap(python: str | None, import_set: ImportSet | None, *, by_worker: bool) -> BootstrapCommand:
    """How a proc is started: with the Python at hand, or with another one of its own host's; as a fork of a
    server that has imported a set, if there is one. A worker of this machine, if one starts it, has no pipe
    of this process to hand on, and the proc ends with the worker.

    Monarch 0.7.0 has a public way to ask for another Python, and one to set a proc's environment, but none
    for both, nor for what a proc runs first; this can go when it has.
    """
    own = default_bootstrap_cmd()
    arguments = ["-m", "forgeasync.launch.bootstrap_main"]
    if import_set is not None:
        lives = None if by_worker else [own_life()]
        arguments = [*fork_server().arguments(import_set, lives=lives), *arguments]
    return BootstrapCommand(python or own.program, None, arguments, own.env)


def spawn_role(
    hosts: HostMesh,
    role: str,
    *,
    num_procs: int,
    gpus_per_proc: list[list[int]] | None = None,
    python: str | None = None,
    import_set: ImportSet | None = None,
    by_worker: bool = False,
) -> ProcMesh:
    """Spawn ``num_procs`` of a role's procs on each host; proc i of a host sees only ``gpus_per_proc[i]``.

    These count among the GPUs that the host itself lets its procs see. With an import set procs that see none
    are forks, on this machine only; ``by_worker`` says that hosts of a job start them. Where there are GPUs
    all are programs, since importing may ask for them.
    """
    if has_gpus() or (gpus_per_proc and any(gpus_per_proc)):
        import_set = None
    gpus: Iterator[list[int]] = iter(gpus_per_proc or []) if gpus_per_proc else itertools.repeat([])
    commands = [
        _bootstrap(python, import_set, by_worker=by_worker).with_env(_environment(next(gpus)))
        for _ in range(num_procs)
    ]
    return hosts.spawn_procs(
        per_host={"procs": num_procs},
        name=role,
        bootstrap=preimport,
        bootstrap_command=lambda point: commands[point["procs"]],
    )
