"""Chooses where the procs of a role run, and in what environment."""

import itertools
from collections.abc import Collection, Iterator

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

from forgeasync.launch.bootstrap_main import GPUS_VARIABLE

OF_A_PROC = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables of procs without GPUs: with two threads in each of several procs on few cores, every proc is
several times slower than with one."""


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


def _bootstrap(python: str | None) -> BootstrapCommand:
    """How a proc is started: with the Python at hand, or with another one of its own host's.

    Monarch 0.7.0 has a public way to ask for another Python, and one to set a proc's environment, but none
    for both, nor for what a proc runs first; this can go when it has.
    """
    own = default_bootstrap_cmd()
    return BootstrapCommand(python or own.program, None, ["-m", "forgeasync.launch.bootstrap_main"], own.env)


def spawn_role(
    hosts: HostMesh,
    role: str,
    *,
    num_procs: int,
    gpus_per_proc: list[list[int]] | None = None,
    python: str | None = None,
) -> ProcMesh:
    """Spawn ``num_procs`` of a role's procs on each host; proc i of a host sees only ``gpus_per_proc[i]``.

    These count among the GPUs that the host itself lets its procs see. ``python`` is the interpreter of the
    hosts; None: the one that runs this.
    """
    gpus: Iterator[list[int]] = iter(gpus_per_proc or []) if gpus_per_proc else itertools.repeat([])
    commands = [_bootstrap(python).with_env(_environment(next(gpus))) for _ in range(num_procs)]
    return hosts.spawn_procs(
        per_host={"procs": num_procs},
        name=role,
        bootstrap=preimport,
        bootstrap_command=lambda point: commands[point["procs"]],
    )
