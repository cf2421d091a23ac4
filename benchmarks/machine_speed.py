"""How fast this machine is just now: the same work on all of its cores at once, timed.

A machine that is shared with others is not as fast in one minute as in the next. A benchmark that compares
what lies minutes apart times this work beside both and knows how much of the difference is the machine's.
"""

import os
import subprocess
import sys

WORK = """
import statistics, time
import numpy as np

rows = np.ones((512, 128), np.float32)
matrix = np.full((128, 128), 0.01, np.float32)
large = np.ones(1_500_000, np.float32)

def work():
    start_s = time.perf_counter()
    for _ in range(300):
        rows @ matrix
    for _ in range(100):
        large * large
    total = 0
    for number in range(2_000_000):
        total += number
    return time.perf_counter() - start_s

work()
print(statistics.median(work() for _ in range(15)))
"""
"""Products of matrices, element-wise products of what does not fit into a core's own cache, and bytecode."""


def work_s() -> float:
    """Return the seconds that the work takes now, as the mean over cores that all do it at the same time."""
    copies = [
        subprocess.Popen(
            [sys.executable, "-c", WORK],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        for _ in os.sched_getaffinity(0)
    ]
    times_s = []
    for copy in copies:
        output, _ = copy.communicate()
        if copy.returncode != 0:
            raise RuntimeError(f"the work that is timed has ended with exit code {copy.returncode}")
        times_s.append(float(output))
    return sum(times_s) / len(times_s)
