"""Peak memory of processes: what is counted, on processes of known size."""

import subprocess
import sys

import pytest

from forgeasync import processes
from forgeasync.processes import MemoryMonitor, MemoryPeak, largest

MIB = 2**20

STARTS_OTHERS = """
import subprocess, sys
from forgeasync.processes import MemoryMonitor

HOLD = "import subprocess, sys; block = b'x' * ({} << 20); {}; print('ready', flush=True); sys.stdin.read()"
START = "other = subprocess.Popen([sys.executable, '-c', {!r}], stdin=subprocess.PIPE, stdout=-1); "
START += "other.stdout.readline()"

def child(num_mib, code="pass"):
    code = HOLD.format(num_mib, code)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

own, all_of_them = MemoryMonitor(with_descendants=False), MemoryMonitor(with_descendants=True)

def show():
    print(own.peak().resident_bytes, all_of_them.peak().resident_bytes)

block = b"x" * (60 << 20)
del block
show()
others = [child(150), child(10, START.format(HOLD.format(300, "pass")))]
for one in others:
    one.stdout.readline()
show()
for one in others:
    one.communicate()
show()
"""


def test_the_largest_process_counts_also_after_it_has_ended() -> None:
    """A process of 60 MiB starts one of 150, and one of 10 that starts one of 300; Python takes about 15."""
    done = subprocess.run([sys.executable, "-c", STARTS_OTHERS], capture_output=True, text=True, check=True)
    alone, together, after = ([int(one) / MIB for one in line.split()] for line in done.stdout.splitlines())
    assert 60 < alone[0] < 110 and alone[1] == alone[0], "freed memory still counts in a peak"
    for own, largest_of_all in (together, after):
        assert own < 110, "without descendants theirs does not count"
        assert 300 < largest_of_all < 350


def test_who_asks_again_soon_gets_what_was_seen_last(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now_s = iter([10, 30, 20]), [100.0]
    monkeypatch.setattr(processes, "_peak_resident_bytes", lambda pid: next(looks))
    monkeypatch.setattr(processes.time, "monotonic", lambda: now_s[0])
    watch = MemoryMonitor(with_descendants=False, every_s=1.0)
    found = []
    for passed_s in (0.0, 0.5, 0.4, 0.2, 1.0, 0.1):
        now_s[0] += passed_s
        found.append(watch.peak().resident_bytes)
    assert found == [10, 10, 10, 30, 30, 30], "the last look, at 20, leaves the peak"


def test_the_largest_of_peaks_by_hand_has_gpus_only_where_something_is_reserved() -> None:
    one, other = MemoryPeak(resident_bytes=2**30, gpu_bytes=2**31), MemoryPeak(resident_bytes=3 * 2**29)
    assert largest([]) is None and largest([None]) is None and largest([None, other]) == other
    assert other.metrics("trainer") == {"memory/trainer_gib": 1.5}
    both = largest([one, None, other])
    assert both is not None
    assert both.metrics("trainer") == {"memory/trainer_gib": 1.5, "memory/trainer_gpu_gib": 2.0}


def test_a_process_that_has_used_no_gpu_says_so() -> None:
    import torch  # noqa: F401  it is asked where it is there

    assert MemoryMonitor(with_descendants=True).peak().gpu_bytes == 0
