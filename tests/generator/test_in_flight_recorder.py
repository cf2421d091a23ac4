"""What of an engine's steps is logged, on outputs as vLLM gives them, without an engine."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from forgeasync.generator import PART_ARGUMENT, TURN_ARGUMENT, InFlightRecorder
from forgeasync.rollouts import (
    BegunTurn,
    CaptureSpec,
    EndedTurn,
    EpisodeId,
    FinishReason,
    InFlightRead,
    LoggedTurn,
    group_turns,
    in_flight,
    read_in_flight,
)

VOCABULARY = 50
PROMPT = np.asarray([3, 4, 5], np.int32)


class Engine:
    """Says what vLLM would say of scripted steps. The first layer has no experts: its rows are zeros."""

    def __init__(self, folder: Path, *, routing: bool = True) -> None:
        self.folder = folder / "log"
        records = CaptureSpec(routing=routing, kept_tokens=True, num_dense_layers=1)
        self.recorder = InFlightRecorder(self.folder, records=records, vocab_size=VOCABULARY)

    def begin(self, group_id: int, index: int = 0) -> int | None:
        episode = EpisodeId(group_id=group_id, index=index)
        return self.recorder.begin_turn(
            BegunTurn(key=0, episode=episode, number=0, after=None, num_tokens_before=0, given_ids=PROMPT)
        )

    def start(self, request_id: str, *, group_id: int = 1) -> int:
        """A group with one turn and a request for it."""
        self.recorder.open_group(group_id)
        key = self.begin(group_id)
        self.add(request_id, key)
        return key

    def add(self, request_id: str, turn: int | None, *, part: int = 0) -> None:
        arguments = {PART_ARGUMENT: part} | ({} if turn is None else {TURN_ARGUMENT: turn})
        self.recorder.request_added(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=PROMPT.tolist(),
                mm_features=None,
                sampling_params=SamplingParams(extra_args=arguments),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def step(self, version: int, *outputs: EngineCoreOutput) -> None:
        self.recorder.stepped(EngineCoreOutputs(outputs=list(outputs), weight_version=str(version)))

    def read(self, *group_ids: int) -> InFlightRead:
        return read_in_flight(self.folder, group_ids)

    def turn(self, group_id: int) -> LoggedTurn:
        (turn,) = group_turns(self.read(group_id).groups[group_id])
        return turn


def output(
    request_id: str,
    ids: list[int],
    *,
    rows: range | None,
    kept: list[list[int]] | None = None,
    finish: EngineFinishReason | None = None,
) -> EngineCoreOutput:
    """Log-probabilities are the ids' negatives; rows of experts their own numbers, behind a dense layer."""
    kept = [[token, 1] for token in ids] if kept is None else kept
    offsets = np.append(0, np.cumsum([len(row) for row in kept]))
    experts = None
    if rows is not None:
        experts = np.zeros((len(rows), 3, 2), np.uint8)
        experts[:, 1:] = np.asarray(rows)[:, None, None]
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=ids,
        new_logprobs=LogprobsLists(
            np.asarray([[token, 1] for token in ids]),
            np.asarray([[-token, -99] for token in ids], np.float32),
            np.zeros(len(ids), int),
        ),
        new_sampling_mask=SamplingMaskLists(
            np.asarray([token for row in kept for token in row], np.int32),
            None if len(ids) == 1 else offsets,
        ),
        routed_experts=experts,
        finish_reason=finish,
    )


def test_a_step_is_logged_for_the_turns_of_all_its_requests(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.recorder.open_group(1)
    first, second = engine.begin(1, index=0), engine.begin(1, index=1)
    engine.add("a", first)
    engine.add("b", second, part=4)
    engine.add("evaluation", None)
    everything = [list(range(VOCABULARY))]
    engine.step(3, output("a", [7], rows=range(3)), output("evaluation", [9], rows=range(9)))
    engine.step(
        4,
        output("b", [8, 2], rows=range(4), kept=[[8, 0], [2]]),
        output("a", [6], rows=range(3, 4), kept=everything, finish=EngineFinishReason.LENGTH),
    )
    one, other = group_turns(engine.read(1).groups[1])
    assert one.batch.ids_N.tolist() == [7, 6] and other.batch.ids_N.tolist() == [8, 2]
    assert one.batch.logprobs_N.tolist() == [-7.0, -6.0]
    assert one.batch.versions_N.tolist() == [3, 4] and other.batch.versions_N.tolist() == [4, 4]
    assert (one.num_parts, other.num_parts) == (1, 5)
    assert one.finish_reason is FinishReason.LENGTH and other.finish_reason is None
    assert one.batch.rows_RMK[:, :, 0].tolist() == [[row, row] for row in range(4)]
    # The whole vocabulary is kept as nothing, ids ascend.
    assert one.batch.num_kept_N.tolist() == [2, 0] and one.batch.kept_ids_J.tolist() == [1, 7]
    assert other.batch.kept_ids_J.tolist() == [0, 8, 2]
    assert engine.read(1).num_lost == 0


def test_a_later_request_adds_only_rows_that_were_not_known(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    key = engine.start("a")
    engine.step(0, output("a", [7], rows=range(3)))
    engine.step(0, output("a", [8], rows=range(3, 4)))
    engine.recorder.request_ended("a")
    engine.step(0, output("a", [44], rows=None))
    engine.add("b", key, part=1)
    # It computes all tokens again; rows of those before the last one are known from when they were sampled.
    engine.step(1, output("b", [9], rows=range(100, 105)))
    turn = engine.turn(1)
    assert turn.batch.ids_N.tolist() == [7, 8, 9] and turn.batch.parts_N.tolist() == [0, 0, 1]
    assert turn.batch.rows_RMK[:, 0, 0].tolist() == [0, 1, 2, 3, 104]


def test_tokens_without_routing_are_not_continued_from(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.start("a")
    engine.step(0, output("a", [7], rows=range(3)))
    engine.step(0, output("a", [8], rows=None))
    engine.step(0, output("a", [9], rows=range(4, 5)))
    read = engine.read(1)
    assert (read.num_kept, read.num_lost) == (1, 2)
    engine.start("b", group_id=2)
    engine.step(0, output("b", [7], rows=None))
    assert (engine.read(2).num_kept, engine.read(2).num_lost) == (0, 1)


def test_where_routing_is_not_recorded_no_token_waits_for_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path, routing=False)
    engine.start("a")
    engine.step(0, output("a", [7], rows=None))
    assert engine.read(1).num_kept == 1 and engine.turn(1).tokens().expert_ids_RMK is None


def test_what_comes_after_the_end_of_a_turn_is_not_logged(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    key = engine.start("a")
    engine.step(0, output("a", [7, 8], rows=range(4)))
    engine.recorder.end_turn(
        EndedTurn(key=key, num_tokens=1, finish_reason=FinishReason.STOP, has_end_token=False, stop_text="7")
    )
    (segment,) = engine.folder.iterdir()
    num_bytes = segment.stat().st_size
    engine.step(0, output("a", [9], rows=range(4, 5)))
    assert segment.stat().st_size == num_bytes
    turn = engine.turn(1)
    assert turn.batch.ids_N.tolist() == [7] and turn.ended.stop_text == "7"


def test_forgotten_groups_and_turns_are_gone(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for group_id in (1, 2):
        engine.recorder.open_group(group_id)
    keys = [engine.begin(1, index=index) for index in range(2)]
    other = engine.begin(2)
    engine.recorder.forget_turns([keys[0]])
    assert [turn.begun.key for turn in group_turns(engine.read(1).groups[1])] == [keys[1]]
    engine.recorder.forget_group(1)
    engine.add("late", keys[1])
    engine.step(0, output("late", [7], rows=range(3)))
    assert engine.read(1, 2).groups.keys() == {2} and engine.begin(1) is None
    # Another group of the same id begins without what the first one had.
    engine.recorder.open_group(2)
    assert engine.read(2).groups == {} and engine.begin(2) not in (None, other)


def test_without_room_a_log_is_given_up_and_later_groups_begin_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path)
    engine.start("a")

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(in_flight, "_write", full)
        engine.step(0, output("a", [7], rows=range(3)))
        assert engine.recorder.num_failures == 1 and not engine.folder.exists()
        assert "No space left on device" in caplog.text and "its 1 groups start over" in caplog.text
        engine.recorder.open_group(2)
        assert engine.recorder.num_failures == 2 and engine.begin(2) is None
    # With room again, what has holes stays out.
    engine.start("c", group_id=3)
    engine.step(0, output("a", [8], rows=range(3, 4)), output("c", [9], rows=range(3)))
    assert engine.begin(1) is None
    read = engine.read(1, 2, 3)
    assert read.groups.keys() == {3} and read.num_kept == 1
    assert engine.recorder.num_failures == 2
