"""Measures the current speed of this machine: times a fixed work load on all cores at once.

The speed of a shared machine changes from minute to minute. A benchmark that compares measurements minutes
apart times this work load next to each one, and so knows the machine's part in the difference.
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
"""Matrix products, element-wise products of arrays larger than a core's cache, and Python bytecode."""


def work_s() -> float:
    """Return the current seconds of the work load, as the mean over all cores working at the same time."""
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
