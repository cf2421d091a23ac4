"""Snapshots cut off at any byte, and trainers killed at any moment: there is always one to go on from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forgeasync.trainer import (
    HEADER_BYTES,
    SnapshotLayout,
    Snapshots,
    StepMemory,
    finish,
    invalidate,
    lay_out,
    newest_common,
    read_version,
    slot_of,
    snapshot_bytes,
)
from tests.support.processes import run_ranks

LAYOUT = lay_out([("weight", torch.zeros(3, 5)), ("step", torch.zeros(())), ("rng", torch.zeros(7).byte())])


class Killed(Exception):
    """The process that writes has ended."""


class CutMemory:
    """A file's memory whose writer is killed after so many bytes; a write in the middle is cut short."""

    def __init__(self, memory: bytearray, num_bytes_left: int) -> None:
        self._memory = memory
        self._num_bytes_left = num_bytes_left

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, place: slice) -> memoryview:
        return memoryview(self._memory)[place]

    def __setitem__(self, place: slice, value: bytes) -> None:
        start = place.start or 0
        fits = value[: self._num_bytes_left]
        self._memory[start : start + len(fits)] = fits
        self._num_bytes_left -= len(fits)
        if len(fits) < len(value):
            raise Killed


def write(memory: CutMemory, version: int, layout: SnapshotLayout) -> None:
    invalidate(memory)  # type: ignore[arg-type]
    body = bytes([version % 251 + 1]) * (layout.num_bytes - HEADER_BYTES)
    memory[HEADER_BYTES : layout.num_bytes] = body
    finish(memory, version=version, digest=layout.digest)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [None, 3])
def test_a_writer_killed_at_any_byte_leaves_no_snapshot_and_no_other_one(before: int | None) -> None:
    for num_bytes in range(8 + 192 + 64):
        memory = bytearray(LAYOUT.num_bytes)
        if before is not None:
            write(CutMemory(memory, 10**6), before, LAYOUT)
        try:
            write(CutMemory(memory, num_bytes), 5, LAYOUT)
        except Killed:
            found = read_version(memoryview(memory), digest=LAYOUT.digest)
            assert found is None or (found == before and num_bytes == 0), num_bytes
        else:
            assert read_version(memoryview(memory), digest=LAYOUT.digest) == 5
    assert num_bytes > 8 + 192 + 56, "the last ones are not cut"


@given(place=st.integers(0, LAYOUT.num_bytes - 1), change=st.integers(1, 255))
def test_a_changed_byte_is_found(place: int, change: int) -> None:
    memory = bytearray(LAYOUT.num_bytes)
    write(CutMemory(memory, 10**6), 4, LAYOUT)
    memory[place] ^= change
    found = read_version(memoryview(memory), digest=LAYOUT.digest)
    # What lies between the header's fields and the first tensor means nothing.
    assert found == (4 if 56 <= place < HEADER_BYTES else None)


def test_a_snapshot_of_another_layout_is_none() -> None:
    memory = bytearray(LAYOUT.num_bytes)
    write(CutMemory(memory, 10**6), 4, LAYOUT)
    renamed = [dataclasses.replace(LAYOUT.parts[0], name="other"), *LAYOUT.parts[1:]]
    other = dataclasses.replace(LAYOUT, parts=tuple(renamed))
    assert read_version(memoryview(memory), digest=other.digest) is None
    longer = bytearray(memory) + bytes(64)
    assert read_version(memoryview(longer), digest=LAYOUT.digest) is None


NUM_RANKS = 3


class Restarts(RuleBasedStateMachine):
    """Ranks that go through steps and write snapshots at their own pace, and a controller that remembers.

    A rank ends a step only together with the others (a collective), and only when its snapshot before is
    written; so the real ranks do (``PolicyTrainer``). What a version holds is the list of its batches.
    """

    @initialize(every_steps=st.integers(1, 3), first_version=st.integers(0, 4))
    def begin(self, every_steps: int, first_version: int) -> None:
        self.every_steps = every_steps
        self.memory: StepMemory[str] = StepMemory(first_version=first_version)
        self.files: list[list[tuple[int, list[str]] | None]] = [[None, None] for _ in range(NUM_RANKS)]
        self.first = [f"before {first_version}"]
        self.made: dict[int, list[str]] = {first_version: self.first}
        """What each version was, when it was made for the first time."""
        self.start(first_version, self.first)

    def start(self, version: int, weights: list[str]) -> None:
        self.version = version
        self.weights = weights
        self.writing: list[tuple[int, list[str]] | None] = [None] * NUM_RANKS
        self.newest: list[int | None] = [
            version if version != self.memory.first_version else None
        ] * NUM_RANKS
        self.is_answered = True

    def make(self, step: int, batch: str) -> None:
        """The optimizer step on every rank, and the beginning of its snapshot."""
        for rank in range(NUM_RANKS):
            self.finish_writing(rank)
        self.version, self.weights = step, [*self.weights, batch]
        if step % self.every_steps == 0:
            for rank in range(NUM_RANKS):
                self.files[rank][slot_of(step, every_steps=self.every_steps)] = None
                self.writing[rank] = (step, self.weights)

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def finish_writing(self, rank: int) -> None:
        if (written := self.writing[rank]) is not None:
            self.files[rank][slot_of(written[0], every_steps=self.every_steps)] = written
            self.newest[rank], self.writing[rank] = written[0], None

    @precondition(lambda self: self.is_answered)
    @rule()
    def step(self) -> None:
        step = self.memory.completed + 1
        self.memory.begin(step, f"batch {step}")
        self.make(step, f"batch {step}")
        self.is_answered = False

    @precondition(lambda self: not self.is_answered)
    @rule()
    def answer(self) -> None:
        self.memory.complete(self.version)
        self.made.setdefault(self.version, self.weights)
        self.is_answered = True

    @precondition(lambda self: None not in self.newest and not any(self.writing))
    @rule()
    def confirm(self) -> None:
        self.memory.save(min(version for version in self.newest if version is not None))

    @rule()
    def kill(self) -> None:
        in_flight = None if self.is_answered else self.memory.completed + 1
        whole: Sequence[dict[int, list[str]]] = [
            dict(one for one in files if one is not None) for files in self.files
        ]
        version = newest_common(whole, at_most=self.memory.completed)
        if version is None:
            self.start(self.memory.first_version, self.first)
        else:
            assert all(files[version] == whole[0][version] for files in whole)
            self.start(version, whole[0][version])
        for step, batch in self.memory.after(self.version):
            self.make(step, batch)
        assert self.version == self.memory.completed
        assert self.weights == self.made[self.version], "a version never names two different weights"
        if in_flight is not None:
            self.make(in_flight, f"batch {in_flight}")
            self.is_answered = False

    @invariant()
    def nothing_is_kept_that_is_safe(self) -> None:
        if hasattr(self, "memory"):
            kept = set(self.memory._batches)
            newest = self.memory.completed + (0 if self.is_answered else 1)
            assert kept == set(range(self.memory.safe_version + 1, newest + 1))


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _write_and_read(folder: Path) -> list[object]:
    """Two ranks write versions 1 to 3, and what another life of theirs finds."""
    import torch.distributed as dist

    def state(version: int) -> dict[str, torch.Tensor]:
        weight = torch.full((4,), 100.0 * version + dist.get_rank())
        return {"weight": weight, "version": torch.tensor(version)}

    snapshots = Snapshots(folder, state(0), every_steps=1)
    found: list[object] = [snapshots.restore(state(0), at_most=9), snapshots.newest]
    for version in (1, 2, 3):
        snapshots.begin_if_due(version, state(version))
        assert snapshots.until_written() >= 0.0
    found.append(snapshots.newest)
    for at_most in (9, 2, 1):
        other, filled = Snapshots(folder, state(0), every_steps=1), state(0)
        found += [other.restore(filled, at_most=at_most), filled["weight"].tolist(), int(filled["version"])]
    assert snapshot_bytes(state(0)) == 2 * (HEADER_BYTES + 128)
    return found


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, _write_and_read, tmp_path)):
        assert found[:3] == [None, None, 3]
        assert found[3:6] == [3, [300.0 + rank] * 4, 3]
        assert found[6:9] == [2, [200.0 + rank] * 4, 2], "the one before is whole too"
        assert found[9:] == [None, [float(rank)] * 4, 0], "older ones are not: the state stays as it is"
