"""Spawns the processes of a role with their GPUs, environment and interpreter.

Each process imports this module first, so it imports little else of forgeasync.
"""

from collections.abc import Collection

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

from forgeasync.runtime.bootstrap_main import GPUS_VARIABLE

CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables of processes without GPUs. On few cores, several processes with two threads each are
several times slower than with one thread each."""


class GpuAllocator:
    """Assigns the GPUs of a host in order, except for reserved ones; on a host without GPUs, assigns none."""

    def __init__(self, num_gpus: int, reserved: Collection[int] = ()) -> None:
        self._num_gpus = num_gpus
        self._left = [gpu for gpu in range(num_gpus) if gpu not in reserved]

    def take(self, num_gpus: int, *, role: str) -> list[int]:
        """Return the indices of the next GPUs.

        Raises:
            ValueError: fewer GPUs are left.
        """
        if self._num_gpus == 0:
            return []
        if num_gpus > len(self._left):
            num_left = len(self._left)
            raise ValueError(
                f"{role} needs {num_gpus} GPUs, but {num_left} of this host's {self._num_gpus} are left"
            )
        gpus, self._left = self._left[:num_gpus], self._left[num_gpus:]
        return gpus


def preimport() -> None:
    """Import torch once in every new process, before messages that need it arrive concurrently."""
    import torch as torch


def spawn_role(
    hosts: HostMesh,
    role: str,
    *,
    num_procs: int,
    gpus_per_proc: list[list[int]] | None = None,
    python: str | None = None,
) -> ProcMesh:
    """Spawn ``num_procs`` processes of a role on each host; process i of a host sees ``gpus_per_proc[i]``.

    These are indices among the GPUs that the host makes visible. ``python`` is the interpreter on the hosts;
    None: the interpreter of this process.
    """
    # Monarch 0.7.0 has a public way to choose another Python, and one to set a process's environment, but
    # none for both, nor for the module that a process runs first.
    own = default_bootstrap_cmd()
    command = BootstrapCommand(
        python or own.program, None, ["-m", "forgeasync.runtime.bootstrap_main"], own.env
    )
    commands = []
    for gpus in gpus_per_proc or [[]] * num_procs:
        environment = {GPUS_VARIABLE: ",".join(map(str, gpus))}
        commands.append(command.with_env(environment if gpus else environment | CPU_ENVIRONMENT))
    return hosts.spawn_procs(
        per_host={"procs": num_procs},
        name=role,
        bootstrap=preimport,
        bootstrap_command=lambda point: commands[point["procs"]],
    )
