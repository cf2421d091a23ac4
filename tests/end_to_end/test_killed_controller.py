"""A run whose controller is killed goes on with the groups that were finished, and samples none again."""

import subprocess
import time
from pathlib import Path

import pytest

from forgeasync.buffer import AnyEvent, LedgerLines, Restored, Resumed, Sampled, Trained, attempt_and_prompt
from forgeasync.checkpoints import list_checkpoints, step_of
from forgeasync.rollouts import SUFFIX, SpilledGroupTorn, read_spilled
from tests.support.app_runs import (
    DEADLINE_S,
    NEVER_ENDING,
    check_ledger,
    finish,
    finish_well,
    read_lines,
    session_processes,
    start,
    wait_until_shown,
    write_tiny_run,
)

EVERY, NUM_MORE = 6, 3
"""Steps between checkpoints, and steps that the resumed run makes after those that were lost."""


def events_of(ledger: Path) -> list[AnyEvent]:
    """All whole lines."""
    lines = LedgerLines(ledger.name)
    return [lines.read(line) for line in ledger.read_bytes().split(b"\n")[:-1]]


def kill_everything(process: subprocess.Popen[str]) -> None:
    """Kill the controller, and wait until nothing of its run is left."""
    process.kill()
    end_s = time.monotonic() + DEADLINE_S
    while session_processes(process.pid):
        assert time.monotonic() < end_s, "processes outlive their controller"
        time.sleep(0.1)
    finish(process)


def texts_on_disk(run_dir: Path) -> dict[int, set[str]]:
    """The texts of the whole groups in the run's folder, by prompt."""
    found = {}
    for file in (run_dir / "payloads").glob(f"*{SUFFIX}"):
        try:
            group = read_spilled(file).group
        except (SpilledGroupTorn, FileNotFoundError):
            continue
        found[attempt_and_prompt(group.draw_id)[1]] = {rollout.text for rollout in group.rollouts}
    return found


def newest_checkpoint(run_dir: Path) -> int:
    return max((step_of(folder) or 0 for folder in list_checkpoints(run_dir / "checkpoints")), default=0)


def steps_after(events: list[AnyEvent], step: int) -> dict[int, set[int]]:
    """The prompts of each later step."""
    return {one.step: set(one.prompts) for one in events if isinstance(one, Trained) and one.step > step}


def would_two_steps_be_lost(run_dir: Path) -> bool:
    """Past a checkpoint, with the groups of the first step after it on the disk."""
    if not (step := newest_checkpoint(run_dir)):
        return False
    lost = steps_after(events_of(run_dir / "ledger.jsonl"), step)
    return 2 <= len(lost) <= EVERY // 2 and lost[step + 1] <= texts_on_disk(run_dir).keys()


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_killed_controller_goes_on_with_its_finished_groups(tmp_path: Path) -> None:
    """It is killed once more as soon as it has gone on."""
    file = write_tiny_run(
        tmp_path,
        "max_off_policy_steps=2",
        f"checkpoint={{every_steps: {EVERY}, keep: 2}}",
        "logging.rollouts_per_step=100",
        scale=4.0,
    )
    run_dir = tmp_path / "run"
    ledger, metrics = run_dir / "ledger.jsonl", run_dir / "metrics.jsonl"
    process = start(file, f"run_dir={run_dir}", NEVER_ENDING)
    wait_until_shown(lambda: would_two_steps_be_lost(run_dir), process)
    kill_everything(process)
    first_step, before, on_disk = newest_checkpoint(run_dir), events_of(ledger), texts_on_disk(run_dir)
    lost = steps_after(before, first_step)
    assert lost, "steps that are lost with the processes"
    # What was trained on by the checkpoint may not have been removed yet.
    ended = set().union(*steps_after(before, 0).values()) - set().union(*lost.values())
    finished = on_disk.keys() - ended

    process = start(file, f"run_dir={run_dir}", NEVER_ENDING, "--resume", "latest")
    wait_until_shown(lambda: any(isinstance(one, Resumed) for one in events_of(ledger)), process)
    kill_everything(process)
    assert texts_on_disk(run_dir).keys() >= finished

    num_steps = max(lost) + NUM_MORE
    before = events_of(ledger)
    process = start(file, f"run_dir={run_dir}", f"max_steps={num_steps}", "--resume", "latest")
    out = finish_well(process, deadline_s=600.0)
    after = events_of(ledger)[len(before) :]
    (resumed,) = (one for one in after if isinstance(one, Resumed))
    assert resumed.step == first_step
    again = [set(batch) for batch in resumed.batches]
    assert again and again == list(lost.values())[: len(again)]
    restored = {one.prompt for one in after if isinstance(one, Restored)}
    sampled = {one.prompt for one in after if isinstance(one, Sampled)}
    assert restored <= finished and set().union(*again) <= restored
    assert sampled and not sampled & restored, "none of it is sampled again"
    trained = steps_after(after, 0)
    assert list(trained.values())[: len(again)] == again, "the same batches"
    assert restored <= set().union(*trained.values())
    if set().union(*lost.values()) <= on_disk.keys():
        assert len(again) == len(lost) and restored == finished, "all that was finished comes back"
    assert f"{len(restored)} finished groups are restored from disk; steps {first_step + 1} to " in out

    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(num_steps + 1))
    assert all(0 <= line["off_policy/age_max"] <= 2 for line in lines[1:])
    assert lines[-1]["buffer/num_restored"] == len(restored)
    assert lines[first_step + 1]["payload/num_read_disk"] > 0
    texts: dict[int, set[str]] = {}
    for one in read_lines(run_dir / "rollouts.jsonl"):
        texts.setdefault(one["step"], set()).add(one["response"])
    for number, prompts in enumerate(again, start=first_step + 1):
        assert texts[number] <= set().union(*(on_disk[prompt] for prompt in prompts)), "the old samples"
    said = check_ledger(run_dir)
    assert said["ends"]["trained"] == num_steps * 4 and said["restored"] == len(restored)
    assert not (run_dir / "payloads").exists(), "nothing is kept of a run that has ended"
