"""A run that was predicted to be faster with one more generator, and adds it by itself."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from forgeasync.config import dump_config
from forgeasync.prediction import PredictionRecord, read_prediction
from forgeasync.profile import write_profile
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.tracing import State, shares
from tests.support.app_runs import DEADLINE_S, NEVER_ENDING, check_open_ledger, finish, read_lines, start
from tests.support.profiles import NO_SETUP, simple_profile
from tests.support.traces import read_traces


def has_computed(run_dir: Path, generator: str) -> bool:
    """Whether this generator has had sequences to decode, by its trace."""
    lanes = read_traces(run_dir).get(generator, [])
    return any(shares([lane], lane.begin_s, lane.end_s).get(State.COMPUTING) for lane in lanes)


def until_grown(run_dir: Path, process: subprocess.Popen[str]) -> PredictionRecord:
    """Wait until the second generator decodes and the run with it was predicted; returns the predictions."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        record = read_prediction(run_dir / "prediction.json")
        if record is not None and record.newest.num_replicas == 2 and has_computed(run_dir, "generator-1"):
            return record
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s, "no generator was added that decodes"
        time.sleep(1.0)


@pytest.mark.exhaustive
def test_a_run_adds_a_generator_by_itself(tmp_path: Path) -> None:
    """The profile says that decoding takes nearly all of the time, and needs no cores."""
    model = write_tiny_model(tmp_path / "model")
    file, profile, run_dir = tmp_path / "run.yaml", tmp_path / "profile.json", tmp_path / "run"
    file.write_text(dump_config(tiny_config(model)))
    setup = NO_SETUP.model_copy(update={"model": str(model), "num_trainer_procs": 2, "num_data_ranks": 2})
    write_profile(simple_profile(decode_s=0.05, decode_per_sequence_s=0.01, setup=setup), profile)
    process = start(
        file,
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "max_off_policy_steps=2",
        f"prediction={{profile: {profile}, max_replicas: 2}}",
    )
    try:
        record = until_grown(run_dir, process)
    except BaseException:
        # Else it would never end.
        process.kill()
        finish(process)
        raise
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "2 generators from now on: " in out and "no generator is added" not in out
    assert record.start.num_replicas == 1 and record.newest.run.step_s < record.start.run.step_s
    *_, last = read_lines(run_dir / "metrics.jsonl")
    assert last["prediction/num_added_replicas"] == 1 and last["faults/detected_generator"] == 0
    check_open_ledger(run_dir)
