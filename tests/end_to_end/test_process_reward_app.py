"""A run whose responses a process reward model scores, step by step, and whose engine dies on the way."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forgeasync.files import RUN_MARK
from forgeasync.processes import marked_processes
from tests.support.app_runs import check_ledger, finish_well, read_lines, start, wait_for_step, write_tiny_run
from tests.support.families import write_process_reward_model

NUM_STEPS = 4


def engines_of(run_dir: Path) -> list[psutil.Process]:
    """Processes with the engine of a process reward model, among those that carry the run's mark."""
    mark = json.loads((run_dir / "run.lock").read_text())["mark"]
    engines = []
    for one in marked_processes(mark, RUN_MARK):
        # Others may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            if "forgeasync.scoring.process_reward_worker" in one.cmdline():
                engines.append(one)
    return engines


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_trains_on_rewards_of_steps_and_outlives_their_engine(tmp_path: Path) -> None:
    """Steps are strictly synchronous: those after the kill have the scores of the next engine."""
    file, run_dir = write_tiny_run(tmp_path, scale=4.0), tmp_path / "run"
    scorer = write_process_reward_model(tmp_path / "scorer")
    reward = f"{{kind: process_reward_model, model_path: {scorer}, step_separator: ';', max_num_seqs: 8, "
    reward += "max_context_length: 256, max_num_batched_tokens: 512, kv_cache_gib: 0.02}"
    overrides = (f"data.reward={reward}", "algorithm.step_credit=minimum", f"max_steps={NUM_STEPS}")
    process = start(file, f"run_dir={run_dir}", *overrides)
    wait_for_step(run_dir, process)
    (engine,) = engines_of(run_dir)
    os.kill(engine.pid, signal.SIGKILL)
    finish_well(process)
    _, *lines = read_lines(run_dir / "metrics.jsonl")
    assert len(lines) == NUM_STEPS
    for line in lines:
        assert 0.0 < line["reward/mean"] < 1.0 and line["reward/std"] > 0.0
        assert 0.0 < line["reward/worst_step"] < 1.0 <= line["reward/num_steps"]
        assert line["grad_norm"] > 0.0 and line["dropped/unscored"] == 0
    assert lines[-1]["score/num_deferred"] > 0, "responses waited for the next engine"
    assert lines[-1]["scoring/num_killed_rewards"] == 0, "the run itself has killed none"
    check_ledger(run_dir)
