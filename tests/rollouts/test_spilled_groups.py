"""Finished groups on the disk: what is read is what was written, or nothing."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.rollouts import (
    FinishReason,
    Group,
    PayloadReader,
    PayloadWriter,
    Rollout,
    Score,
    SpilledGroup,
    SpilledGroupTorn,
    Step,
    Task,
    create_run_folder,
    decode_rollout,
    encode_facts,
    file_name,
    read_spilled,
    remove_run_folder,
    spilled_groups,
    try_write_kept,
    write_spilled,
)
from forgeasync.runtime import RefusedGroup, SampledRollout, store_group
from tests.support.payloads import HOST, MIB
from tests.support.rollouts import make_rollout

Sampled = tuple[tuple[Rollout, ...], SpilledGroup]
"""Rollouts, and the group that they are stored as."""


@pytest.fixture(scope="module")
def sampled() -> Iterator[Sampled]:
    shared = create_run_folder(MIB)
    rollouts = tuple(make_rollout(seed, 4, 5 + seed) for seed in range(3))
    stored = store_group(
        PayloadWriter(shared, HOST, MIB),
        [
            SampledRollout(branches=(rollout,), finish_reason=FinishReason.STOP, episode=index)
            for index, rollout in enumerate(rollouts)
        ],
        group_id=7,
        generator_rank=0,
    )
    assert not isinstance(stored, RefusedGroup)
    record = {"text": "naïve \N{SNOWMAN}", "numbers": [1, 2.5, None]}
    task = Task(task_id="a", prompt="p", answer="q", source_index=3, source="s", record=record)
    scores = (
        Score(0.1, False, parts={"format": 0.2}, steps=(Step(end=2, value=0.3),), penalties={"late": 1.0}),
        Score(1e30, True, has_answer=False),
    )
    group = Group(group_id=7, draw_id=10**9 + 5, task=task, rollouts=stored, durations_ms=(1, 2, 3))
    yield rollouts, SpilledGroup(group=group, rewards=(0.1 + 0.2, -1.0), kept=(0, 2), scores=scores)
    remove_run_folder(shared)


def arrays_of(kept: SpilledGroup) -> str:
    return kept.group.rollouts[0].branches[0].response.file


@pytest.fixture(scope="module")
def file(sampled: Sampled, tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, kept = sampled
    target = tmp_path_factory.mktemp("kept") / file_name(kept.group.draw_id)
    write_spilled(target, encode_facts(kept), arrays_of(kept))
    return target


def test_all_of_a_group_comes_back_on_any_host(sampled: Sampled, file: Path) -> None:
    rollouts, kept = sampled
    found = read_spilled(file)
    assert found.group.is_restored and not kept.group.is_restored
    before = {
        ref.payload_id: ref
        for rollout in kept.group.rollouts
        for branch in rollout.branches
        for ref in (branch.prompt, branch.response)
    }
    assert found.with_refs(lambda ref: before[ref.payload_id]) == kept
    reader = PayloadReader("another host")
    for rollout, stored in zip(rollouts, found.group.rollouts, strict=True):
        (branch,) = stored.branches
        trace = decode_rollout(reader.read(branch.prompt, copy=False), reader.read(branch.response))
        np.testing.assert_array_equal(trace.prompt_ids_P, rollout.prompt_ids_P, strict=True)
        np.testing.assert_array_equal(trace.response_ids_T, rollout.response_ids_T, strict=True)
        np.testing.assert_array_equal(trace.logprobs_T, rollout.logprobs_T, strict=True)
        assert trace.routed_experts is not None and rollout.routed_experts is not None
        assert trace.routed_experts.to_dense().tobytes() == rollout.routed_experts.to_dense().tobytes()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_that_is_cut_anywhere_is_torn(file: Path, tmp_path: Path) -> None:
    whole, cut = file.read_bytes(), tmp_path / "cut.group"
    for num_bytes in range(len(whole)):
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(SpilledGroupTorn):
            read_spilled(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(SpilledGroupTorn, match="were written"):
        read_spilled(cut)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_file_with_another_bit_is_torn(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(file.read_bytes())
    # Its header and facts as often as its arrays.
    last = data.draw(st.sampled_from([40, 2000, len(whole)]))
    whole[data.draw(st.integers(0, last - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = tmp_path_factory.mktemp("changed") / "changed.group"
    changed.write_bytes(whole)
    with pytest.raises(SpilledGroupTorn):
        read_spilled(changed)


def test_facts_of_another_version_of_this_package_are_torn(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.group"
    write_spilled(other, b'{"group":null}'.ljust(24), str(file))
    with pytest.raises(SpilledGroupTorn, match="another version of this package"):
        read_spilled(other)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_what_cannot_be_kept_leaves_nothing(
    sampled: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    _, kept = sampled

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spilled_groups.os if failing == "fsync" else Path, failing, refuse)
    problem = try_write_kept(tmp_path / "one.group", encode_facts(kept), arrays_of(kept))
    assert problem is not None and "No space left on device" in problem
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert try_write_kept(tmp_path / "one.group", encode_facts(kept), arrays_of(kept)) is None
    problem = try_write_kept(tmp_path / "two.group", encode_facts(kept), "/dev/shm/nothing")
    assert problem is not None and "its arrays freed" in problem
    assert [file.name for file in tmp_path.iterdir()] == ["one.group"]
