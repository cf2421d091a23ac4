"""A run whose controller is killed goes on with the groups that were finished, and samples none again."""

import os
import signal
import time
from pathlib import Path

import pytest

from forgeasync.buffer.events import Restored, Sampled, Trained
from forgeasync.buffer.submissions import attempt_and_prompt
from forgeasync.config.load import dump_config
from forgeasync.config.run import CheckpointSection
from forgeasync.ledger.lines import START, AnyEvent, Resumed, decode_line
from forgeasync.rollouts.kept_groups import SUFFIX, KeptGroupTorn, read_kept
from tests.support.app_runs import DEADLINE_S, check_ledger, finish, read_lines, session_processes, start
from tests.support.models import write_random_model
from tests.support.runs import tiny_config

EVERY, KILL_AFTER, NUM_STEPS = 3, 5, 8
"""Steps between checkpoints; the run is killed when it has recorded step ``KILL_AFTER``."""


def events_of(ledger: Path) -> list[AnyEvent]:
    """All whole lines."""
    events, position = [], START
    for line in ledger.read_bytes().split(b"\n")[:-1]:
        event, position = decode_line(line, position)
        events.append(event)
    return events


def kill_everything(pid: int) -> None:
    """Kill the controller, and wait until nothing of its run is left."""
    os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + DEADLINE_S
    while session_processes(pid):
        assert time.monotonic() < end_s, "processes outlive their controller"
        time.sleep(0.1)


def prompts_on_disk(run_dir: Path) -> dict[int, set[str]]:
    """The texts of the whole groups in the run's folder, by prompt."""
    found = {}
    for file in (run_dir / "payloads").glob(f"*{SUFFIX}"):
        try:
            group = read_kept(file).group
        except KeptGroupTorn:
            continue
        found[attempt_and_prompt(group.draw_id)[1]] = {rollout.text for rollout in group.rollouts}
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_killed_controller_goes_on_with_its_finished_groups(tmp_path: Path) -> None:
    config = tiny_config(write_random_model(tmp_path / "model", scale=4.0))
    updates = {
        "max_steps": NUM_STEPS,
        "max_off_policy_steps": 2,
        "checkpoint": CheckpointSection(every_steps=EVERY, keep=2),
        "logging": config.logging.model_copy(update={"rollouts_per_step": 100}),
    }
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config.model_copy(update=updates)))
    run_dir = tmp_path / "run"
    process = start(file, f"run_dir={run_dir}")
    metrics, end_s = run_dir / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > KILL_AFTER):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s, "too few steps"
        time.sleep(0.02)
    kill_everything(process.pid)
    finish(process)
    before, on_disk = events_of(run_dir / "ledger.jsonl"), prompts_on_disk(run_dir)
    lost = {one.step: set(one.prompts) for one in before if isinstance(one, Trained) and one.step > EVERY}
    assert list(lost)[:2] == [4, 5], "steps that are lost with the processes"
    complete = set(on_disk) - set().union(*lost.values())

    code, out, err = finish(start(file, f"run_dir={run_dir}", "--resume", "latest"), deadline_s=600.0)
    assert code == 0, err
    after = events_of(run_dir / "ledger.jsonl")[len(before) :]
    (resumed,) = (one for one in after if isinstance(one, Resumed))
    assert resumed.step == EVERY
    assert [set(batch) for batch in resumed.batches] == list(lost.values())
    restored = {one.prompt for one in after if isinstance(one, Restored)}
    assert restored == set().union(*lost.values()) | complete, "all that was finished, and on the disk"
    sampled = {one.prompt for one in after if isinstance(one, Sampled)}
    assert sampled and not sampled & restored, "none of it is sampled again"
    trained = {one.step: set(one.prompts) for one in after if isinstance(one, Trained)}
    assert {step: trained[step] for step in lost} == lost, "the same batches"
    assert complete <= set().union(*trained.values()), "what was not trained on is now"
    assert (
        f"{len(restored)} finished groups come back from the disk; steps 4 to {max(lost)} are made again"
        in out
    )

    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert all(0 <= line["off_policy/age_max"] <= 2 for line in lines[1:])
    assert lines[-1]["buffer/num_restored"] == len(restored)
    assert lines[4]["payload/num_read_disk"] > 0 and not lines[-1]["buffer/num_unkept_groups"]
    assert not lines[-1]["buffer/num_left_out_groups"]
    texts: dict[int, set[str]] = {}
    for one in read_lines(run_dir / "rollouts.jsonl"):
        texts.setdefault(one["step"], set()).add(one["response"])
    for step, prompts in lost.items():
        assert texts[step] <= set().union(*(on_disk[prompt] for prompt in prompts)), "the old samples"
    said = check_ledger(run_dir)
    assert said["ends"]["trained"] == NUM_STEPS * 4 and said["restored"] == len(restored)
    assert not (run_dir / "payloads").exists(), "nothing is kept of a run that has ended"
