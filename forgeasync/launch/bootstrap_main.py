"""The first code of every proc, run as ``python -m forgeasync.launch.bootstrap_main``.

Slurm, and whoever else stops a job, sends SIGTERM to all of its processes at once. The controller then
decides what is still done: a checkpoint, an export. It needs the procs for that, so they do not end by
themselves: they end when the controller stops them, or when it has ended itself (Monarch has the kernel kill
a proc whose parent is gone).

A proc sees its own GPUs only. Which they are is found here, on the proc's host: a job that shares a host with
others is given some of its GPUs in CUDA_VISIBLE_DEVICES, and the controller may be on another host.
"""

import itertools
import os
import runpy
import signal
from types import FrameType

from forgeasync.faults import name_shared_memory

GPUS_VARIABLE = "FORGEASYNC_GPUS"
"""Environment variable with the places of a proc's GPUs among those of its host, such as "0,1"."""

HOST_DEVICES_VARIABLE = "FORGEASYNC_HOST_DEVICES"
"""Environment variable with the CUDA_VISIBLE_DEVICES of a proc's whole host; missing if it has none."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stay(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN it is not inherited by programs that a proc starts."""


def visible_devices(places: str, inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a proc with the GPUs at ``places`` of ``inherited``; None: the host has all.

    Raises:
        ValueError: the host may use fewer GPUs than that.
    """
    wanted = [int(place) for place in places.split(",") if place]
    if inherited is None:
        return places
    names = [name.strip() for name in inherited.split(",")]
    # CUDA ignores what comes after the first name that it does not know, which -1 and nothing are for.
    names = list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    if wanted and max(wanted) >= len(names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={inherited} lets this host's procs see {len(names)} GPUs, but this proc "
            f"is to have number {max(wanted)}, counted from 0"
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
