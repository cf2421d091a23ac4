"""What the recorder makes of a step: every number by hand, and nothing of it told twice."""

import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from forgeasync.buffer import START, Batch, DropReason
from forgeasync.checkpoints import RunState
from forgeasync.config import RunConfig
from forgeasync.controller import RunRecorder, StepRecord, StepTimes
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.models import character_tokenizer
from forgeasync.observability import HeldOutScores, RunDir, StepConsole, StepLine
from forgeasync.processes import MemoryPeak
from forgeasync.rollouts import AsyncPayloadBudget, Group, PayloadBudget, PromptEncoder, RolloutKey, Score
from forgeasync.runtime import BufferReport
from forgeasync.scoring import GroupFiltering
from forgeasync.trainer import StepResult
from forgeasync.weights import FetchReport, WeightLedger
from tests.support.buffer_world import make_snapshot, make_task
from tests.support.loops import make_config, make_scoring
from tests.support.rollouts import make_stored_rollout
from tests.support.step_records import TRAINER

ONE_OF_FOUR = HeldOutScores(num_correct=1, score_sum=2.0, num_scored=4, num_unscored=0)
TIMES = StepTimes(
    step_s=8.0, wait_for_batch_s=2.0, train_s=4.0, publish_weights_s=0.5, eval_s=1.0, controller_s=1.0
)

PROMPTS = PromptEncoder(character_tokenizer(chat_template=False), chat_template=False)


def make_group(group_id: int, rewards: tuple[float, float], *spans: tuple[int, int, int]) -> Group:
    """Two rollouts of 3 prompt tokens and 4 response tokens, sampled under the versions of ``spans``."""
    rollouts = tuple(make_stored_rollout(*spans, num_prompt_tokens=3, text=str(reward)) for reward in rewards)
    return Group(
        group_id=group_id, draw_id=group_id, task=make_task(group_id), rollouts=rollouts, rewards=rewards
    )


def fetch(version: int, *, bad: int = 0, fetch_s: float = 0.5) -> FetchReport:
    return FetchReport(
        version=version,
        is_complete=not bad,
        num_bytes_moved=100 + version,
        num_bytes_needed=90,
        num_bad_blocks=bad,
        fetch_s=fetch_s,
    )


def swap(pause_s: float, waited_s: float) -> SwapReport:
    return SwapReport(
        pause_s=pause_s, waited_s=waited_s, num_crossing=3, num_resumed=2, num_recomputed=5, progress=()
    )


class Console(StepConsole):
    """Keeps the lines whole: they are cut to what fits a terminal."""

    def __init__(self, max_steps: int, stream: io.StringIO) -> None:
        super().__init__(max_steps, stream=stream)
        self.lines: list[StepLine] = []

    def step(self, line: StepLine) -> None:
        self.lines.append(line)
        super().step(line)


class Recording:
    """A recorder in a folder, and what it has written."""

    def __init__(self, config: RunConfig) -> None:
        self.run_dir = RunDir.create(config, "", datetime(2030, 1, 1))
        self.printed = io.StringIO()
        self.config = config
        self.console = Console(config.max_steps, self.printed)
        self.recorder = RunRecorder(config, self.run_dir, self.console, None, prompts=PROMPTS)
        self.budget = PayloadBudget(1000, excess_bytes=600)
        self.payloads = AsyncPayloadBudget(self.budget, largest_group_bytes=200)
        self.ledger = WeightLedger(lease_timeout_s=60.0)
        self.dropped: Counter[DropReason] = Counter()
        self.memory: MemoryPeak | None = None
        self.engine_memory: list[MemoryPeak | None] = []

    def record(
        self,
        step: int,
        *,
        generated: tuple[int, ...] = (0,),
        held_out: HeldOutScores | None = None,
        skip_reason: str | None = None,
        is_rolled_back: bool = False,
        not_kept: str | None = None,
        weights: tuple[float, ...] = (1.0, 1.0),
        times: StepTimes = TIMES,
        spans: tuple[tuple[int, int, int], ...] = ((0, 0, 4),),
    ) -> dict[str, float]:
        """Record a step; its line of metrics."""
        self.recorder.record(
            StepRecord(
                step=step,
                batch=Batch(
                    trainer_version=step - 1,
                    groups=(make_group(0, (1.0, 0.0), *spans), make_group(1, (0.0, 0.0), *spans)),
                    weights=weights,
                ),
                result=StepResult(
                    policy_version=step,
                    num_targets=16,
                    num_padding_tokens=24,
                    train_s=4.0,
                    metrics=TRAINER,
                    skip_reason=skip_reason,
                    is_rolled_back=is_rolled_back,
                    not_kept=not_kept,
                    memory=self.memory,
                ),
                times=times,
                engines=tuple(
                    EngineStats(num_generated_tokens=tokens, busy_s=1.5, memory=memory)
                    for tokens, memory in itertools.zip_longest(generated, self.engine_memory)
                ),
                buffer=BufferReport(metrics={"buffer/num_in_flight": 7}, num_dropped=self.dropped),
                counters=GroupFiltering(self.config.algorithm, seed=0).metrics()
                | make_scoring(self.config).metrics()
                | self.payloads.metrics()
                | self.ledger.metrics(),
                held_out=held_out,
            )
        )
        return self.lines()[-1]

    def lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    config = make_config(f"run_dir={tmp_path / 'run'}", "logging.tensorboard=false")
    recording = Recording(config)
    with recording.recorder:
        yield recording


@pytest.mark.parametrize(("age_of", "oldest"), [("oldest_token", 2), ("token", 1)])
def test_tokens_that_do_not_train_have_no_age(tmp_path: Path, age_of: str, oldest: int) -> None:
    bound = ("max_off_policy_steps=1", f"buffer.age_of={age_of}")
    recording = Recording(make_config(f"run_dir={tmp_path / 'run'}", "logging.tensorboard=false", *bound))
    with recording.recorder:
        line = recording.record(3, spans=((0, 0, 1), (1, 1, 4)))
    assert line["off_policy/age_max"] == oldest


def test_a_step_by_hand(recording: Recording) -> None:
    recording.budget.reserve(0, 200)
    recording.budget.reserve(1, 200)
    recording.budget.settle(1, 150)
    recording.payloads.num_waits = 3
    recording.ledger.num_skipped, recording.ledger.num_expired_leases = 4, 2
    recording.dropped[DropReason.STALE] = 2
    line = recording.record(1, generated=(60, 20), held_out=ONE_OF_FOUR, weights=(1.0, 3.0))
    expected = {
        "step": 1,
        "policy_version": 1,
        "reward/mean": 0.25,
        "eval/accuracy": 0.25,
        "eval/score_mean": 0.5,
        "eval/num_unscored": 0,
        "trainer/num_skipped_steps": 0,
        "trainer/num_rolled_back_steps": 0,
        "trainer/num_unkept_batches": 0,
        "scoring/num_failed_attempts": 0,
        "time/step_s": 8.0,
        "time/wait_for_batch_s": 2.0,
        "time/train_s": 4.0,
        "time/publish_weights_s": 0.5,
        "time/eval_s": 1.0,
        "throughput/train_tokens_per_s": 2.0,
        "throughput/generated_tokens_per_s": 10.0,
        "dropped/stale": 2,
        "trainer/num_padding_tokens": 24,
        "generator/busy_s": 3.0,
        "payload/num_bytes_held": 150,
        "payload/num_bytes_reserved": 200,
        # Each group's file takes a page.
        "payload/bytes_per_token": 2 * 4096 / 28,
        "payload/num_waits": 3,
        "buffer/num_in_flight": 7,
        "filtered/num_rollouts": 0,
        "load/trainer_wait_share": 0.25,
        "accounting/weight_max": 3.0,
        "weights/num_skipped_versions": 4,
        "weights/num_expired_leases": 2,
        "off_policy/age_max": 0,
    }
    assert {key: line.get(key) for key in expected} == pytest.approx(expected)
    assert line["loss"] == 0.5 and line["time/elapsed_s"] < 60.0
    assert "reward/scored_mean" not in line and "time/checkpoint_s" not in line
    assert recording.printed.getvalue().startswith("step 1/3  reward  0.250  eval 0.250 ")
    records = [json.loads(one) for one in recording.run_dir.rollouts.read_text().splitlines()]
    assert {(one["step"], one["reward"], one["response"]) for one in records} == {
        (1, 1.0, "1.0"),
        (1, 0.0, "0.0"),
    }


def test_tokens_of_what_is_written_are_asked_for(tmp_path: Path) -> None:
    """The same rollouts as in rollouts.jsonl; nobody is asked where none is written."""
    config = make_config(f"run_dir={tmp_path / 'one'}", "logging.rollouts_per_step=1")
    one = Recording(config)
    groups = [make_group(0, (1.0, 0.0), (0, 0, 4)), make_group(1, (0.0, 0.0), (0, 0, 4))]
    with one.recorder as recorder:
        asked = [recorder.picks(step, groups) for step in range(1, 9)]
        for step in range(1, 9):
            one.record(step)
        assert len(recorder.files) == 3
    records = [json.loads(line) for line in one.run_dir.rollouts.read_text().splitlines()]
    assert asked == [
        {RolloutKey(group_id=line["group_id"], episode=line["episode"], agent=line["agent"])}
        for line in records
    ]
    assert len({line["group_id"] for line in records}) == 2, "not always the same one"
    lines = [json.loads(line) for line in one.run_dir.tokens.read_text().splitlines()]
    assert lines == [{"step": step, "worst": []} for step in range(1, 9)]
    config = make_config(f"run_dir={tmp_path / 'none'}", "logging.rollouts_per_step=0")
    silent = Recording(config)
    with silent.recorder as none:
        assert none.picks(1, groups) is None
        assert "metrics/num_nonfinite_token_values" not in silent.record(1)
    assert not silent.run_dir.tokens.exists()


def test_counts_of_a_step_are_those_since_the_step_before(recording: Recording) -> None:
    recording.recorder.record_initial(ONE_OF_FOUR, 3.0, [EngineStats(num_generated_tokens=40, busy_s=1.0)])
    assert recording.lines() == [
        {
            "step": 0,
            "policy_version": 0,
            "eval/accuracy": 0.25,
            "eval/score_mean": 0.5,
            "eval/num_unscored": 0,
            "time/eval_s": 3.0,
            "time/elapsed_s": 0.0,
            "metrics/num_nonfinite": 0,
            "metrics/num_tensorboard_errors": 0,
        }
    ]
    assert "step 0: held-out accuracy 0.250, mean score 0.500" in recording.printed.getvalue()
    recording.dropped |= {DropReason.STALE: 2, DropReason.FILTERED: 1}
    first = recording.record(1, generated=(120,))
    assert recording.console.lines[-1].waited_for == "train 4.0/8.0s"
    recording.dropped[DropReason.STALE] = 5
    second = recording.record(2, generated=(200,))
    assert first["throughput/generated_tokens_per_s"] == 10.0, "the evaluation's tokens are not a step's"
    assert second["throughput/generated_tokens_per_s"] == 10.0
    assert (first["dropped/stale"], second["dropped/stale"]) == (2, 3)
    assert (first["dropped/filtered"], second["dropped/filtered"]) == (1, 0)


def test_what_comes_after_a_step_is_told_with_the_next_one(recording: Recording) -> None:
    after = {"record_s": 0.25, "wait_for_disk_s": 0.5, "checkpoint_s": 0.375}
    first = recording.record(1, times=dataclasses.replace(TIMES, **after))
    second, third = recording.record(2), recording.record(3)
    names = ("time/controller_s", "time/wait_for_disk_s", "time/checkpoint_s")
    assert [first.get(name) for name in names] == [1.0, 0.0, None]
    assert [second.get(name) for name in names] == [1.25, 0.5, 0.375]
    assert [third.get(name) for name in names] == [1.0, 0.0, None]


def test_how_versions_travelled_and_what_was_scored_is_told_once(recording: Recording) -> None:
    recorder = recording.recorder
    recorder.record_scored([Score(1.0, True), Score(0.0, False)], [3, 5])
    recorder.record_scored([Score(value, False) for value in (0.5, 0.0, 0.0, 0.0)], [1, 2, 3, 4])
    for report in (fetch(1, fetch_s=0.25), fetch(2, bad=3, fetch_s=0.75)):
        recorder.record_fetch(report)
    for one in (swap(0.01, 0.5), swap(0.03, 0.125)):
        recorder.record_swap(one)
    expected = {
        "reward/scored_mean": 0.25,
        "group/all_correct_share": 0.0,
        "group/all_wrong_share": 0.5,
        "response/no_answer_share": 0.0,
        "response/length_mean_correct": 3.0,
        "response/length_mean_wrong": 3.0,
        "generator/max_pause_s": 0.03,
        "generator/max_swap_wait_s": 0.5,
        "generator/num_crossing": 6,
        "generator/num_resumed": 4,
        "generator/num_recomputed": 10,
        "weights/num_swaps": 2,
        "weights/max_fetch_s": 0.75,
        "weights/num_bytes_moved": 203,
        "weights/num_bytes_needed": 180,
        "weights/num_bad_blocks": 3,
    }
    first, second = recording.record(1), recording.record(2)
    assert {key: first.get(key) for key in expected} == pytest.approx(expected)
    told_once = {key for key in expected if key.startswith(("reward/", "group/", "response/"))}
    assert not told_once & second.keys()
    assert {second[key] for key in expected.keys() - told_once} == {0}
    printed = recording.printed.getvalue()
    assert "version 1" not in printed
    assert printed.startswith(
        "the fetch of version 2 is incomplete: 3 blocks failed their checksums; the generator keeps its "
        "weights\n"
    )


def test_memory_is_that_of_the_largest_process_of_each_role(recording: Recording) -> None:
    gib = 2**30
    recording.memory = MemoryPeak(resident_bytes=3 * gib, gpu_bytes=40 * gib)
    recording.engine_memory = [
        MemoryPeak(resident_bytes=2 * gib),
        MemoryPeak(resident_bytes=6 * gib),
        MemoryPeak(resident_bytes=5 * gib),
    ]
    line = recording.record(1, generated=(1, 2, 3))
    found = {key: value for key, value in line.items() if key.startswith("memory/")}
    own_gib = found.pop("memory/controller_gib")
    assert found == {"memory/trainer_gib": 3.0, "memory/trainer_gpu_gib": 40.0, "memory/generator_gib": 6.0}
    assert 0.05 < own_gib < 64.0


def test_what_is_refused_is_named(recording: Recording) -> None:
    recording.recorder.warn("rollout 0: routed_experts: 2 layers")
    assert recording.printed.getvalue() == "refused: rollout 0: routed_experts: 2 layers\n"


def test_skipped_and_rolled_back_steps_are_counted_and_their_batches_kept(recording: Recording) -> None:
    lines = [
        recording.record(1),
        recording.record(2, skip_reason="the loss is nan"),
        recording.record(3, skip_reason="the norm is inf", is_rolled_back=True),
        recording.record(4, skip_reason="a spike", not_kept="rows of trainer rank 1: no room"),
    ]
    folders = sorted(recording.run_dir.bad_steps.iterdir())
    # A file where the folder is to be.
    (recording.run_dir.bad_steps / "step-00000005").touch()
    lines += [recording.record(5, skip_reason="a spike"), recording.record(6)]
    names = ("skipped_steps", "rolled_back_steps", "unkept_batches")
    counts = [[line[f"trainer/num_{name}"] for name in names] for line in lines]
    assert counts == [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 1, 1], [4, 1, 2], [4, 1, 2]]
    assert [folder.name for folder in folders] == ["step-00000002", "step-00000003", "step-00000004"]
    kept = json.loads((folders[0] / "rollouts.json").read_text())
    assert (kept["step"], kept["reason"]) == (2, "the loss is nan")
    rewards = [(one["response"], one["reward"]) for one in kept["rollouts"]]
    assert rewards == [("1.0", 1.0), *[("0.0", 0.0)] * 3]
    printed = recording.printed.getvalue()
    assert f"step 2 was skipped: the loss is nan; its batch is in {folders[0]}" in printed
    assert "step 3 was rolled back: the norm is inf; its batch is in" in printed
    assert "step 4 was skipped: a spike; its batch could not be kept whole in" in printed
    assert "(rows of trainer rank 1: no room)" in printed and "File exists" in printed


def test_only_the_newest_bad_batches_are_kept(tmp_path: Path) -> None:
    """Also of those that the run had kept before it was resumed."""
    overrides = ("logging.tensorboard=false", "trainer.bad_steps.num_kept=2")
    recording = Recording(make_config(f"run_dir={tmp_path / 'run'}", *overrides))
    for step in (7, 100_000_001):
        (recording.run_dir.bad_steps / f"step-{step:08d}").mkdir(parents=True)
    with recording.recorder:
        recording.record(8, skip_reason="nan")
        recording.record(9)
    found = sorted(folder.name for folder in recording.run_dir.bad_steps.iterdir())
    assert found == ["step-00000008", "step-100000001"]


def test_held_out_problems_without_a_score_are_named(recording: Recording) -> None:
    held_out = HeldOutScores(num_correct=0, score_sum=0.0, num_scored=0, num_unscored=3)
    assert "none of 3 responses" in str(held_out)
    line = recording.record(1, held_out=held_out)
    assert line["eval/num_unscored"] == 3 and "eval/accuracy" not in line
    assert "3 held-out problems were not scored" in recording.printed.getvalue()


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"wait_for_batch_s": 5.0}, "batch 5.0/8.0s"),
        ({}, "train 4.0/8.0s"),
        ({"publish_weights_s": 4.5}, "publish 4.5/8.0s"),
        ({"eval_s": 6.25}, "eval 6.2/8.0s"),
    ],
)
def test_the_console_names_what_took_longest(changes: dict[str, float], longest: str) -> None:
    assert dataclasses.replace(TIMES, **changes).longest() == longest


def test_a_resumed_run_goes_on_with_its_clock_and_hides_what_comes_again(tmp_path: Path) -> None:
    config = make_config(f"run_dir={tmp_path / 'run'}")
    run_dir = RunDir.create(config, "", datetime(2030, 1, 1))
    state = RunState(
        step=5, elapsed_s=1000.0, model={}, config={}, problems="", buffer=make_snapshot(5), ledger=START
    )
    console = StepConsole(config.max_steps, stream=io.StringIO())
    with RunRecorder(config, run_dir, console, state, prompts=PROMPTS) as recorder:
        assert 1000.0 <= recorder.elapsed_s < 1060.0
    (events,) = run_dir.tensorboard.iterdir()
    starts = [event for event in EventFileLoader(str(events)).Load() if event.HasField("session_log")]
    assert [event.step for event in starts] == [6]
