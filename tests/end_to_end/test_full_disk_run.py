"""A run on a disk that becomes full: it waits, says so, and goes on when there is room."""

import json
import time
from pathlib import Path

import pytest

from forgeasync.checkpoints import list_checkpoints
from forgeasync.controller import newest_step
from tests.support.app_runs import (
    DEADLINE_S,
    check_ledger,
    finish_well,
    read_lines,
    start,
    wait_until_shown,
    write_tiny_run,
)
from tests.support.disks import fill_up, small_disk

NUM_STEPS = 12


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_run_waits_for_room_and_loses_nothing(tmp_path: Path) -> None:
    file = write_tiny_run(tmp_path)
    with small_disk(tmp_path / "disk", num_mib=40) as disk:
        run_dir = disk / "run"
        process = start(file, f"run_dir={run_dir}", f"max_steps={NUM_STEPS}", "checkpoint.every_steps=1")
        try:
            metrics, filler = run_dir / "metrics.jsonl", disk / "filler"
            wait_until_shown(lambda: newest_step(metrics) > 2, process)
            end_s = time.monotonic() + DEADLINE_S
            faults, num_before = run_dir / "faults.jsonl", -1
            # It stands still once two looks, with more than a step between them, find the same steps.
            while (num_lines := len(metrics.read_bytes().splitlines())) != num_before:
                assert process.poll() is None and time.monotonic() < end_s
                num_before = num_lines
                for _ in range(400):
                    # What the run removes, such as a checkpoint that has failed, makes room again.
                    fill_up(filler)
                    time.sleep(0.02)
            assert num_lines <= NUM_STEPS, "it waits before its end"
            assert not metrics.read_bytes() or metrics.read_bytes().endswith(b"\n"), "no half of a line"
            for folder in list_checkpoints(run_dir / "checkpoints"):
                assert (folder / "trainer" / ".metadata").stat().st_size, "what is shown is whole"
            filler.unlink()
        except BaseException:
            process.kill()
            raise
        out = finish_well(process)
        events = [json.loads(line) for line in faults.read_text().splitlines()]
        assert {one["role"] for one in events} == {"storage"}
        assert [one["event"] for one in events].count("detected") == len(events) / 2 >= 1
        assert "No space left on device" in events[0]["what"]
        assert "cannot be written" in out and "was written after" in out
        steps = [line["step"] for line in read_lines(metrics)]
        assert steps == list(range(NUM_STEPS + 1)), "no line is lost, and none is there twice"
        assert read_lines(metrics)[-1]["faults/storage_wait_s"] > 0
        assert check_ledger(run_dir)["step"] == NUM_STEPS
        names = [one.name for one in (run_dir / "checkpoints").iterdir()]
        assert sorted(names) == ["final", f"step-{NUM_STEPS - 1:08d}", f"step-{NUM_STEPS:08d}"]
