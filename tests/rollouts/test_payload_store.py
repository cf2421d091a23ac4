"""Payloads in shared memory: writers, readers, and the folder of a run."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forgeasync.actors import RefusedGroup, SampledRollout, store_group
from forgeasync.buffer import DropReason
from forgeasync.rollouts import (
    FinishReason,
    PayloadGone,
    PayloadReader,
    PayloadRef,
    PayloadStoreFull,
    PayloadTorn,
    PayloadWriter,
    create_run_folder,
    group_num_bytes,
    remove_run_folder,
    run_folder,
    sweep_stale_folders,
)
from forgeasync.rollouts import payloads as shared_memory
from tests.support.payloads import HOST, MIB, assert_same, make_payload, read_for_ever, write_and_die
from tests.support.recorded_rollouts import make_rollout


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = create_run_folder(64 * MIB)
    yield folder
    if folder.exists():
        remove_run_folder(folder)


def test_a_group_is_one_file_and_every_payload_is_read_by_its_reference(folder: Path) -> None:
    writer = PayloadWriter(folder, HOST, MIB)
    payloads = [make_payload(seed, num_tokens=100 * seed) for seed in range(5)]
    refs = writer.write_group(payloads)
    (file,) = folder.iterdir()
    assert {ref.file for ref in refs} == {str(file)} and {ref.host_id for ref in refs} == {HOST}
    assert writer.num_bytes_held == group_num_bytes(refs) == file.stat().st_blocks * 512
    for copy in (True, False):
        for ref, payload in zip(reversed(refs), reversed(payloads), strict=True):
            assert_same(PayloadReader(HOST).read(ref, copy=copy), payload)


def test_ids_are_unique_across_groups_and_writers(folder: Path) -> None:
    writers = [PayloadWriter(folder, HOST, MIB) for _ in range(2)]
    refs = [ref for writer in writers * 2 for ref in writer.write_group([make_payload(0)] * 3)]
    assert len({ref.payload_id for ref in refs}) == 12 and len({ref.file for ref in refs}) == 4


def test_views_are_read_only_and_outlive_the_file(folder: Path) -> None:
    writer = PayloadWriter(folder, HOST, MIB)
    payload = make_payload(1)
    (ref,) = writer.write_group([payload])
    views = PayloadReader(HOST).read(ref, copy=False)
    writer.free(ref.file)
    assert_same(views, payload)
    assert not any(view.flags.writeable for view in views.values())


def test_freed_and_never_written_are_gone(folder: Path) -> None:
    writer = PayloadWriter(folder, HOST, MIB)
    (ref,) = writer.write_group([make_payload(1)])
    writer.free(ref.file)
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())
    for lost in (ref, replace(ref, file=str(folder / "never"))):
        with pytest.raises(PayloadGone, match=f"payload {ref.payload_id}: file .*{lost.file}.*found nothing"):
            PayloadReader(HOST).read(lost)


def test_freeing_twice_is_a_bug(folder: Path) -> None:
    writer = PayloadWriter(folder, HOST, MIB)
    (ref,) = writer.write_group([make_payload(1)])
    writer.free(ref.file)
    with pytest.raises(AssertionError, match="was freed already"):
        writer.free(ref.file)


def test_a_payload_of_another_host_is_refused(folder: Path) -> None:
    (ref,) = PayloadWriter(folder, HOST, MIB).write_group([make_payload(1)])
    with pytest.raises(ValueError, match=r"is on host host-a, this is host host-b.*RemotePayloadReader"):
        PayloadReader("host-b").read(ref)


@pytest.mark.parametrize("position", [0, 20, 70, -1])
def test_a_damaged_payload_is_torn_and_its_neighbours_are_not(folder: Path, position: int) -> None:
    refs = PayloadWriter(folder, HOST, MIB).write_group([make_payload(seed) for seed in range(3)])
    damaged = bytearray(Path(refs[0].file).read_bytes())
    start, end = refs[1].offset, refs[1].offset + refs[1].num_bytes
    damaged[(end if position < 0 else start) + position] ^= 4
    Path(refs[0].file).write_bytes(damaged)
    reader = PayloadReader(HOST)
    with pytest.raises(PayloadTorn, match=refs[1].payload_id):
        reader.read(refs[1])
    for seed in (0, 2):
        assert_same(reader.read(refs[seed]), make_payload(seed))


def test_a_truncated_file_is_torn(folder: Path) -> None:
    refs = PayloadWriter(folder, HOST, MIB).write_group([make_payload(seed) for seed in range(2)])
    num_file_bytes = os.stat(refs[0].file).st_size
    os.truncate(refs[0].file, num_file_bytes - 1)
    with pytest.raises(
        PayloadTorn, match=f"should be 'at least {num_file_bytes}' but is {num_file_bytes - 1}"
    ):
        PayloadReader(HOST).read(refs[1])
    assert_same(PayloadReader(HOST).read(refs[0]), make_payload(0))


def test_capacity_is_never_exceeded(folder: Path) -> None:
    one_group = group_num_bytes(PayloadWriter(folder, HOST, MIB).write_group([make_payload(0)]))
    writer = PayloadWriter(folder, HOST, 2 * one_group)
    (first,) = writer.write_group([make_payload(0)])
    writer.write_group([make_payload(0)])
    with pytest.raises(PayloadStoreFull) as caught:
        writer.write_group([make_payload(0)])
    for number in (2 * one_group, one_group):
        assert f"{number:,}" in str(caught.value)
    assert writer.num_bytes_held == 2 * one_group
    writer.free(first.file)
    writer.write_group([make_payload(0)])


def test_threads_cannot_exceed_the_capacity_together(folder: Path) -> None:
    one_group = group_num_bytes(PayloadWriter(folder, HOST, MIB).write_group([make_payload(0)]))
    writer = PayloadWriter(folder, HOST, 3 * one_group)
    outcomes: list[bool] = []

    def write() -> None:
        try:
            writer.write_group([make_payload(0)])
        except PayloadStoreFull:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=write) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 9 + [True] * 3
    assert writer.num_bytes_held == 3 * one_group and len(list(folder.iterdir())) == 4


def test_a_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("in the middle")

    writer = PayloadWriter(folder, HOST, MIB)
    with monkeypatch.context() as broken:
        broken.setattr(shared_memory, "write_into", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            writer.write_group([make_payload(0)])
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())


def test_a_full_filesystem_is_an_error_and_not_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said, not brought about: filling the real one would take the memory of everything else on the machine.
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = PayloadWriter(folder, HOST, MIB)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(PayloadStoreFull, match="another program has filled it"):
            writer.write_group([make_payload(0)])
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())


SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy the locks of other tests' threads."""


def test_a_writer_killed_in_mid_write_leaves_no_file_with_a_final_name(folder: Path) -> None:
    process = SPAWN.Process(target=write_and_die, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not list(folder.glob("*.group")) and len(list(folder.iterdir())) == 1


def test_readers_killed_at_random_harm_neither_writer_nor_other_readers(folder: Path) -> None:
    rng = random.Random(0)
    writer = PayloadWriter(folder, HOST, 64 * MIB)
    held: list[list[tuple[int, PayloadRef]]] = []
    for round_number in range(4):
        seeds = range(10 * round_number, 10 * round_number + 4)
        refs = writer.write_group([make_payload(seed) for seed in seeds])
        held.append(list(zip(seeds, refs, strict=True)))
        known = [pair for group in held for pair in group]
        links, readers = [], []
        for _ in range(2):
            here, there = SPAWN.Pipe(duplex=False)
            readers.append(SPAWN.Process(target=read_for_ever, args=(known, there)))
            readers[-1].start()
            there.close()
            links.append(here)
        for link in links:
            assert link.recv() == "reading"
        if len(held) > 2:
            writer.free(held.pop(0)[0][1].file)
        time.sleep(rng.uniform(0.0, 0.05))
        for reader, link in zip(readers, links, strict=True):
            reader.kill()
            reader.join()
            # Its end of the pipe is closed: what comes now is what it said before, then the end.
            with pytest.raises(EOFError):
                pytest.fail(f"a reader failed: {link.recv()}")
            link.close()
    for group in held:
        for seed, ref in group:
            assert_same(PayloadReader(HOST).read(ref), make_payload(seed))
        writer.free(group[0][1].file)
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())


CREATE_AND_WAIT = """
import sys, time
from pathlib import Path
from forgeasync.rollouts.run_folder import create_run_folder
folder = create_run_folder(0, root=Path(sys.argv[1]))
(folder / "x.group").write_bytes(b"x")
print(folder, flush=True)
time.sleep(600)
"""


def make_elsewhere(root: Path, *prefix: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder and lives, and the folder."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", CREATE_AND_WAIT, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_controllers_are_swept_and_no_others(tmp_path: Path) -> None:
    own = create_run_folder(0, root=tmp_path)
    foreign = tmp_path / "forgeasync_payloads-of-someone-else"
    foreign.mkdir()
    process, theirs = make_elsewhere(tmp_path)
    try:
        assert str(process.pid) in theirs.name and theirs.is_dir()
        assert sweep_stale_folders(root=tmp_path) == []
        process.send_signal(signal.SIGKILL)
        # Not waited for yet: a zombie still has its pid and start time.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert sweep_stale_folders(root=tmp_path) == [theirs]
    finally:
        process.kill()
        process.communicate()
    assert sorted(tmp_path.iterdir()) == sorted([own, foreign])
    remove_run_folder(own)


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")


def test_a_folder_of_another_pid_namespace_is_swept_once_its_process_is_gone(tmp_path: Path) -> None:
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no pid namespace can be made here: {tried.stderr.strip()}")
    process, theirs = make_elsewhere(tmp_path, *UNSHARE)
    try:
        assert "-1-" in theirs.name, "it is the first process of a namespace"
        assert sweep_stale_folders(root=tmp_path) == [] and (theirs / "x.group").exists()
    finally:
        process.kill()
        process.communicate()
    while not (swept := sweep_stale_folders(root=tmp_path)):
        time.sleep(0.01)
    assert swept == [theirs] and not list(tmp_path.iterdir())


def test_folders_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, theirs = make_elsewhere(tmp_path)
    process.kill()
    process.communicate()
    with monkeypatch.context() as someone_else:
        someone_else.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert sweep_stale_folders(root=tmp_path) == []
    assert sweep_stale_folders(root=tmp_path) == [theirs]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "forgeasync_payloads-1-0123456789abcdef").symlink_to(kept)
    assert sweep_stale_folders(root=tmp_path) == [] and kept.is_dir()


CREATE_MANY = """
import os, sys
from pathlib import Path
from forgeasync.rollouts.run_folder import create_run_folder, remove_run_folder
for number in range(int(sys.argv[2])):
    folder = create_run_folder(0, root=Path(sys.argv[1]))
    (folder / "x.group").write_bytes(b"x")
    if number % 3:
        remove_run_folder(folder)
for folder in Path(sys.argv[1]).glob(f"*-{os.getpid()}-*"):
    assert (folder / "x.group").read_bytes() == b"x"
    print(folder.name)
os.kill(os.getpid(), 9)
"""


def test_sweepers_beside_each_other_take_nothing_from_the_living(tmp_path: Path) -> None:
    """Sweepers look at every moment between making a folder and locking it; creators end by SIGKILL."""
    num_folders = 300
    creators = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE_MANY, str(tmp_path), str(num_folders)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    swept: list[Path] = []

    def sweep() -> None:
        while any(creator.poll() is None for creator in creators):
            swept.extend(sweep_stale_folders(root=tmp_path))
        swept.extend(sweep_stale_folders(root=tmp_path))

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    ended = [creator.communicate() for creator in creators]
    for sweeper in sweepers:
        sweeper.join()
    for creator, (out, err) in zip(creators, ended, strict=True):
        assert creator.returncode == -signal.SIGKILL, err
        assert len(out.split()) == num_folders // 3
        assert set(out.split()) <= {folder.name for folder in swept}
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_fit_is_refused_at_its_start(tmp_path: Path) -> None:
    filesystem = os.statvfs(tmp_path)
    with pytest.raises(ValueError, match=r"but only .* are free there"):
        create_run_folder(2 * filesystem.f_blocks * filesystem.f_frsize, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_shared_memory_without_memory_behind_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_available_memory_bytes", lambda: MIB)
    with pytest.raises(ValueError, match="but only 1,048,576 of memory are available"):
        create_run_folder(MIB + 1, root=tmp_path)
    assert create_run_folder(MIB, root=tmp_path).is_dir()


def test_a_run_folder_goes_with_all_it_holds() -> None:
    folder = create_run_folder(MIB)
    PayloadWriter(folder, HOST, MIB).write_group([make_payload(0)])
    remove_run_folder(folder)
    assert not folder.exists()
    with pytest.raises(AssertionError, match="not a folder of payloads"):
        remove_run_folder(Path("/dev/shm"))


def test_a_group_that_its_writer_has_no_room_for_is_refused_alone(folder: Path) -> None:
    rollouts = [
        SampledRollout(branches=(make_rollout(seed, 5, 40),), finish_reason=FinishReason.STOP, episode=seed)
        for seed in range(3)
    ]
    writer = PayloadWriter(folder, HOST, 2**14)
    stored = store_group(writer, rollouts, group_id=6, generator_rank=3)
    assert isinstance(stored, tuple) and {one.generator_rank for one in stored} == {3}
    held = writer.num_bytes_held
    refused = store_group(writer, rollouts * 9, group_id=7, generator_rank=3)
    assert isinstance(refused, RefusedGroup) and refused.reason is DropReason.OVERSIZED
    assert "group 7: a group needs 65,536 bytes; payloads of this generator" in refused.problem
    assert writer.num_bytes_held == held, "nothing of it stays"
    assert isinstance(store_group(writer, rollouts[:1], group_id=8, generator_rank=3), tuple)
