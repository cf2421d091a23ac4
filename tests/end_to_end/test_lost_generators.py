"""A run whose generators are killed and stopped, one after the other, makes all of its steps."""

import os
import signal
from pathlib import Path

import pytest

from forgeasync.controller import newest_step
from tests.support.app_runs import (
    NEVER_ENDING,
    check_open_ledger,
    finish,
    pid_of,
    read_lines,
    start,
    wait_until_shown,
    write_tiny_run,
)

LIMIT_S = 600.0


def events_of(run_dir: Path, event: str) -> list[dict[str, object]]:
    file = run_dir / "faults.jsonl"
    lines = read_lines(file) if file.exists() else []
    return [line for line in lines if line["event"] == event]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_generators_are_killed_and_stopped_and_nothing_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        write_tiny_run(tmp_path),
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "max_off_policy_steps=2",
        "generator.num_replicas=2",
        "sampling.max_response_tokens=60",
        "checkpoint.every_steps=null",
        "evaluation.every_steps=100000",
        "logging.rollouts_per_step=100",
    )

    def until_more_steps(count: int) -> None:
        wanted = newest_step(run_dir / "metrics.jsonl") + count
        wait_until_shown(lambda: newest_step(run_dir / "metrics.jsonl") >= wanted, process, limit_s=LIMIT_S)

    def until_recovered(count: int) -> None:
        wait_until_shown(lambda: len(events_of(run_dir, "recovered")) == count, process, limit_s=LIMIT_S)

    try:
        until_more_steps(3)
        killed, stopped = (pid_of(run_dir, "generator", rank) for rank in (0, 1))
        os.kill(killed, signal.SIGKILL)
        until_recovered(1)
        assert pid_of(run_dir, "generator", 0) != killed
        until_more_steps(3)
        os.kill(stopped, signal.SIGSTOP)
        until_recovered(2)
        until_more_steps(3)
    finally:
        # The run ends in order, and whatever has happened leaves nothing behind.
        process.send_signal(signal.SIGTERM)
        _, _, err = finish(process)
    assert [event["what"] for event in events_of(run_dir, "detected")] == [
        "has died",
        "has not answered for generator.heartbeat_s = 8 s",
    ], err
    died, stood_still = events_of(run_dir, "detected")
    assert "evidence" not in died and stood_still["evidence"]
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    last = steps[-1]
    assert last["stall/num_found"] == 0
    assert last["faults/detected_generator"] == last["faults/recovered_generator"] == 2
    assert last["generator/num_healthy"] == 2 and last["generator/num_lost"] == 2
    assert last["faults/tokens_kept_share"] >= 0.95
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        assert line["off_policy/age_max"] <= 2 and line["dropped/lost"] == line["dropped/late"] == 0
        assert line["dropped/bad_record"] == 0 and line["routing/recorded_share"] == 1.0
        # Tokens whose version is not that of their weights would differ far more from the trainer's.
        if line["off_policy/age_max"] == 0:
            assert line["mismatch/logprob_abs_max"] < 1e-4
    check_open_ledger(run_dir)
