"""A buffer with its journal, killed and resumed, and what is proved of it from the files alone."""

import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.verify import main
from forgeasync.buffer import (
    CheckpointedBuffer,
    DropReason,
    LedgerPosition,
    ReplayBuffer,
    ResumedBuffer,
    RunHasEnded,
    Submission,
    Update,
    check_ledger,
    open_buffer,
)
from forgeasync.checkpoints import RunState, model_shape
from forgeasync.controller import find_checkpoint, open_files
from forgeasync.files import read_json_lines
from forgeasync.rollouts import Group
from forgeasync.schema import ConfigError
from tests.support.buffer_world import make_task
from tests.support.config_samples import FACTS
from tests.support.loops import make_config
from tests.support.rollouts import make_stored_rollout


class JournaledRun:
    """A run of two groups a step around a real buffer and journal; writes metrics as the recorder does."""

    def __init__(self, folder: Path, resumed: CheckpointedBuffer | None = None) -> None:
        config = make_config("algorithm.groups_per_step=2")
        state = ReplayBuffer(
            groups_per_step=2,
            group_size=1,
            max_off_policy_steps=1,
            num_groups_in_run=100,
            section=config.buffer,
            accounting=config.accounting,
        )
        if resumed is not None:
            state.restore(resumed.snapshot)
        self.folder = folder
        ledger, before = folder / "ledger.jsonl", resumed and ResumedBuffer(checkpointed=resumed)
        self.buffer = open_buffer(state, ledger, config, before)
        self._version = state.snapshot().trainer_version
        self._num_submitted = state.snapshot().num_submitted
        self._num_skipped = 0
        self._num_dropped: Counter[DropReason] = Counter()

    def change(self, act: Callable[..., object], *args: object, **kwargs: object) -> None:
        self.buffer.change(lambda buffer: act(buffer, *args, **kwargs))

    async def sample(self) -> Group:
        """Sample the next prompt's group."""
        if not self.buffer.state.snapshot().pending:
            self.change(
                ReplayBuffer.submit, [make_task(self._num_submitted), make_task(self._num_submitted + 1)]
            )
            self._num_submitted += 2
        (start,), _ = await self.buffer.until(lambda buffer: buffer.start_groups(1))
        rollout = make_stored_rollout((self._version, 0, 4))
        group = Group(group_id=start.group_id, draw_id=start.draw_id, task=start.task, rollouts=(rollout,))
        self.change(ReplayBuffer.finished, group)
        return group

    async def drop(self, reason: DropReason) -> None:
        self.change(ReplayBuffer.failed, (await self.sample()).group_id, reason)

    async def step(self, *, update: Update = Update.MADE, recorded: bool = True) -> None:
        for _ in range(2):
            self.change(ReplayBuffer.scored, (await self.sample()).group_id, (1.0,), (0,))
        await self.buffer.until(ReplayBuffer.take)
        self.change(ReplayBuffer.committed, trainer_wait_share=0.0, update=update)
        self._num_skipped += update is Update.SKIPPED
        self._version += 1
        self.change(ReplayBuffer.set_served_version, self._version)
        if not recorded:
            return
        now = Counter(self.buffer.state.num_dropped)
        line = {
            "step": self._version,
            "trainer/num_skipped_steps": self._num_skipped,
            **{f"dropped/{reason}": now[reason] - self._num_dropped[reason] for reason in DropReason},
        } | await self.buffer.durable()
        self._num_dropped = now
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


async def whole_run(folder: Path) -> CheckpointedBuffer:
    """Three steps with drops, a kill, a resumption after step 2, two more; returns the last checkpoint."""
    run = JournaledRun(folder)
    await run.drop(DropReason.FILTERED)
    await run.drop(DropReason.BAD_RECORD)
    await run.step()
    await run.step(update=Update.SKIPPED)
    await run.drop(DropReason.UNSCORED)
    await run.sample()
    checkpoint = await run.buffer.checkpoint()
    await run.step(recorded=False)
    await run.buffer.durable()
    # Killed: the lock goes with the process.
    run.buffer._journal._file.close()
    run = JournaledRun(folder, checkpoint)
    await run.step()
    await run.drop(DropReason.FILTERED)
    await run.step()
    last = await run.buffer.checkpoint()
    await run.drop(DropReason.BAD_RECORD)
    await run.buffer.end()
    with pytest.raises(RunHasEnded):
        run.change(ReplayBuffer.submit, [make_task(0)])
    with pytest.raises(RunHasEnded):
        await run.buffer.until(ReplayBuffer.take)
    return last


Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Runs the program, and returns its exit code and all that it has printed."""

    def run_it(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["verify", *map(str, arguments)])
        code = main()
        out, err = capsys.readouterr()
        return code, out + err

    return run_it


@pytest.fixture
def last(tmp_path: Path) -> CheckpointedBuffer:
    """The last checkpoint of a run in ``tmp_path``."""
    return asyncio.run(whole_run(tmp_path))


@pytest.fixture
def run(tmp_path: Path, last: CheckpointedBuffer) -> Path:
    return tmp_path


def test_a_run_with_drops_and_a_resumption_is_proved(run: Path, verify: Verify) -> None:
    code, out = verify(run, "--json")
    assert code == 0, out
    said = json.loads(out)
    assert said["ends"] == {"trained": 6, "skipped": 2, "filtered": 2, "dropped": {}, "unfinished": 2}
    assert said["submitted"] == 12 and said["open"] == 0 and said["is_ended"] and said["step"] == 4
    assert said["reissued"] == 3 and said["restarted"] == 1 and said["contradiction"] is None
    assert said["lost_groups"] == {"bad_record": 2, "filtered": 2, "unscored": 1}
    (resumption,) = said["resumptions"]
    assert resumption["undone_steps"] == [3] and resumption["after_step"] == 2
    assert len(resumption["untrained_prompts"]) == 2
    assert said["compared_steps"] == 4
    code, out = verify(run / "ledger.jsonl")
    assert code == 0, out
    assert f"resumed after step 2 (line {resumption['line']}): step 3 undone; training undone: " in out
    assert out.splitlines()[-1] == "every prompt has exactly one end; metrics.jsonl agrees in 4 steps"


async def test_a_run_that_was_killed_has_open_prompts(tmp_path: Path, verify: Verify) -> None:
    run = JournaledRun(tmp_path)
    await run.step()
    await run.sample()
    await run.step(recorded=False)
    await run.buffer.durable()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"n":')
    code, out = verify(tmp_path, "--json")
    said = json.loads(out)
    assert code == 0 and not said["is_ended"] and said["open"] == 2 and said["num_torn_bytes"] == 5
    assert said["compared_steps"] == 1, "the ledger is ahead of the metrics"
    code, out = verify(tmp_path)
    assert "no prompt has more than one end" in out and "wait for the run to be resumed" in out


def test_contradictions_and_missing_ledgers_have_codes_of_their_own(run: Path, verify: Verify) -> None:
    file = run / "ledger.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"trained"' in line)
    file.write_bytes(b"".join([*lines[:at], *lines[at + 1 :]]))
    words = f"line {at + 1}: has the number {at + 2}"
    code, out = verify(run)
    assert code == 1 and f"contradiction: {words}" in out, out
    code, out = verify(run, "--json")
    assert code == 1 and json.loads(out)["contradiction"].startswith(words)
    file.unlink()
    code, out = verify(run)
    assert code == 2 and "refused: " in out and "cannot be read" in out


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (1, {"dropped/filtered": 0}, "step 1 the metrics count 0 groups dropped as filtered, the ledger 1"),
        (4, {"dropped/filtered": 0}, "step 4 the metrics count 0 groups dropped as filtered, the ledger 1"),
        (3, {"dropped/unscored": 1}, "step 3 the metrics count 1 groups dropped as unscored, the ledger 0"),
        (2, {"trainer/num_skipped_steps": 0}, "step 2 the metrics count 0 skipped steps, the ledger 1"),
        (2, {"step": 1}, "is of step 1, as line 1 is"),
        (4, {"step": 9}, "is of step 9, which the ledger has not trained"),
        (2, {"ledger/num_events": 3}, "step 2 was recorded after line 3 of the ledger, but it was trained"),
        (1, {"ledger/num_events": 40}, "step 1 was recorded after line 40 of the ledger, but"),
        (1, {"dropped/stale": None}, "dropped/stale is None, not a count"),
        (1, None, "has no line of step 1, which was trained in line"),
        (4, None, "has no line of step 4, which was trained in line"),
    ],
)
def test_metrics_that_say_something_else_are_found(
    run: Path, verify: Verify, step: int, changes: dict[str, object] | None, words: str
) -> None:
    """``changes`` of None take the step's line away."""
    file = run / "metrics.jsonl"
    lines = {line["step"]: line for line in read_json_lines(file)}
    if changes is None:
        del lines[step]
    else:
        lines[step] |= changes
    file.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    code, out = verify(run)
    assert code == 1 and words in out, out


def test_the_last_step_before_an_interruption_needs_no_metrics(run: Path, verify: Verify) -> None:
    """A run that is told to stop commits the step under way, and does not record it."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], *lines[2:]]))
    code, out = verify(run)
    assert code == 0 and "agrees in 3 steps" in out


async def test_a_resumed_run_without_a_ledger_begins_one_at_its_step(
    run: Path, last: CheckpointedBuffer, verify: Verify
) -> None:
    (run / "ledger.jsonl").unlink()
    again = JournaledRun(run, last)
    await again.step()
    await again.buffer.end()
    code, out = verify(run, "--json")
    said = json.loads(out)
    assert code == 0 and said["begins_after_step"] == 4 and said["step"] == 5
    assert said["ends"]["trained"] == 2
    assert said["submitted"] == said["ended_before_ledger"] + 2 + said["ends"]["unfinished"]


def problem(run: Path, resumed: CheckpointedBuffer) -> str:
    """The only one."""
    with pytest.raises(ConfigError) as refused:
        check_ledger(run / "ledger.jsonl", resumed, checkpoint=Path("step-4"))
    (found,) = refused.value.problems
    return str(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_submitted": 4}, "number of submitted prompts: 4 in the checkpoint, 10 in"),
        ({"next_group_id": 3}, "next group: 3 in the checkpoint, "),
        ({"pending": (Submission(submission_id=1, task=make_task(1)),)}, "{1: 0} in the checkpoint, {} in"),
        ({"trainer_version": 3}, "continues from the checkpoint of step 3 in line"),
    ],
)
def test_a_checkpoint_that_says_something_else_is_refused(
    run: Path, last: CheckpointedBuffer, changes: dict[str, object], words: str
) -> None:
    wrong = dataclasses.replace(last, snapshot=dataclasses.replace(last.snapshot, **changes))
    assert words in problem(run, wrong)


def test_a_ledger_of_another_run_is_refused(run: Path, last: CheckpointedBuffer) -> None:
    wrong = dataclasses.replace(last.ledger, checksum=last.ledger.checksum ^ 1)
    found = problem(run, dataclasses.replace(last, ledger=wrong))
    assert f"{wrong.checksum:08x}, the ledger has {last.ledger.checksum:08x} there" in found
    longer = LedgerPosition(num_lines=1000, checksum=0)
    found = problem(run, dataclasses.replace(last, ledger=longer))
    assert "line 1000 has the checksum 00000000, the ledger has " in found and " lines" in found


def test_a_run_is_resumed_only_with_a_ledger_that_fits(run: Path, last: CheckpointedBuffer) -> None:
    """By the checkpoint's folder and the run's, as ``--resume latest`` finds them."""
    config = make_config("algorithm.groups_per_step=2", "max_steps=9", f"run_dir={run}")
    folder = run / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    state = RunState(
        step=4,
        elapsed_s=0.0,
        model=model_shape(FACTS),
        config=config.model_dump(mode="json"),
        problems="",
        buffer=last.snapshot,
        ledger=last.ledger,
    )
    (folder / "run.json").write_bytes(state.encode())
    file = run / "ledger.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"n":')
    resumed = find_checkpoint(config, FACTS, "latest")
    assert resumed.state.checkpointed_buffer == last
    file.write_bytes(whole.replace(b'"step":2', b'"step":3'))
    with pytest.raises(ConfigError, match=r"the ledger contradicts itself: .* was altered"):
        find_checkpoint(config, FACTS, "latest")
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        find_checkpoint(config, FACTS, "latest")
    file.write_bytes(whole + b'{"n":')
    tokens = run / "tokens.jsonl"
    tokens.write_text('{"step": 4, "worst": []}\n{"step": 5, "worst": []}\n{"step"')
    versions = run / "versions"
    versions.mkdir()
    exported = [run / "checkpoints" / f"version-{version}" for version in (4, 5)]
    archived = [versions / f"0000000{first}-rank-1.weights" for first in (3, 4, 6)]
    for path in (*exported, *archived):
        path.touch()
    messages = open_files(config, resumed).messages
    assert [path.exists() for path in exported] == [True, False]
    assert [path.exists() for path in archived] == [True, False, False]
    assert "00000006-rank-1.weights moved to 00000006-rank-1.cut-1.weights" in messages
    assert "2 lines of tokens.jsonl after step 4 moved to tokens.cut-1.jsonl" in messages
    assert tokens.read_text() == '{"step": 4, "worst": []}\n'
    assert "5 bytes of an unfinished last line of ledger.jsonl removed" in messages
    assert file.read_bytes() == whole
    file.unlink()
    # The files that were moved aside stay.
    messages = open_files(config, find_checkpoint(config, FACTS, "latest")).messages
    assert "ledger.jsonl is missing: a new one begins after step 4" in messages
