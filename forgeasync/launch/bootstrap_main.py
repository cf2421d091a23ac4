"""The first code of every proc, run as ``python -m forgeasync.launch.bootstrap_main``.

Slurm, and whoever else stops a job, sends SIGTERM to all of its processes at once. The controller then
decides what is still done: a checkpoint, an export. It needs the procs for that, so they do not end by
themselves: they end when the controller stops them, or when it has ended itself (Monarch has the kernel kill
a proc whose parent is gone).
"""

import runpy
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


def stay(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN it is not inherited by programs that a proc starts."""


if __name__ == "__main__":
    for number in STOPPING:
        signal.signal(number, stay)
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
