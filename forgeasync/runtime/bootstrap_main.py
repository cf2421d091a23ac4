"""Entry point of every spawned process, run as ``python -m forgeasync.runtime.bootstrap_main``.

To stop a job, Slurm and others send SIGTERM to all of its processes at once. The controller then decides what
to finish, such as a checkpoint or an export, and needs the other processes for it. Therefore they ignore
SIGTERM. They end when the controller stops them or has ended: Monarch lets the kernel kill a process whose
parent has ended.

A process sees only its own GPUs. They are selected here, on the process's host: a job that shares a host gets
some of its GPUs in CUDA_VISIBLE_DEVICES, and the controller may be on another host.
"""

import itertools
import os
import runpy
import signal
from types import FrameType

from forgeasync.files import name_shared_memory

GPUS_VARIABLE = "FORGEASYNC_GPUS"
"""Environment variable with the indices of a process's GPUs among those of its host, such as "0,1"."""

HOST_DEVICES_VARIABLE = "FORGEASYNC_HOST_DEVICES"
"""Environment variable with the CUDA_VISIBLE_DEVICES of the whole host; not set if the host has none."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that request a process to stop."""


def stay(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, programs that a process starts do not inherit this handler."""


def visible_devices(places: str, inherited: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for the GPUs at ``places`` of ``inherited``; None: all GPUs are visible.

    Raises:
        ValueError: ``inherited`` has fewer GPUs.
    """
    wanted = [int(place) for place in places.split(",") if place]
    if inherited is None:
        return places
    names = [name.strip() for name in inherited.split(",")]
    # CUDA ignores names after the first unknown one; -1 and an empty name are used for that.
    names = list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    if wanted and max(wanted) >= len(names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={inherited} lets this host's processes see {len(names)} GPUs, but this "
            f"one needs number {max(wanted)}, counted from 0"
        )
    return ",".join(names[place] for place in wanted)


if __name__ == "__main__":
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if inherited is not None:
        os.environ[HOST_DEVICES_VARIABLE] = inherited
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(os.environ[GPUS_VARIABLE], inherited)
    for number in STOP_SIGNALS:
        signal.signal(number, stay)
    name_shared_memory()
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
