"""The folder of a run in shared memory: refused without room, removed whole, swept after a crash."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forgeasync.rollouts import (
    PayloadWriter,
    create_run_folder,
    remove_run_folder,
    run_folder,
    sweep_stale_folders,
)
from tests.support.payloads import HOST, MIB, make_payload

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
    foreign, link = (
        tmp_path / f"forgeasync_payloads-{name}" for name in ("of-someone-else", "1-0123456789abcdef")
    )
    foreign.mkdir()
    link.symlink_to(foreign)
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
    assert sorted(tmp_path.iterdir()) == sorted([own, foreign, link])
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


def test_a_run_that_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the filesystem, or in the memory behind it."""
    filesystem = os.statvfs(tmp_path)
    with pytest.raises(ValueError, match=r"but only .* are free there"):
        create_run_folder(2 * filesystem.f_blocks * filesystem.f_frsize, root=tmp_path)
    monkeypatch.setattr(run_folder, "available_host_bytes", lambda: MIB)
    with pytest.raises(ValueError, match="but only 1,048,576 of memory are available"):
        create_run_folder(MIB + 1, root=tmp_path)
    assert not list(tmp_path.iterdir())
    assert create_run_folder(MIB, root=tmp_path).is_dir()


def test_a_run_folder_goes_with_all_it_holds() -> None:
    folder = create_run_folder(MIB)
    PayloadWriter(folder, HOST, MIB).write_group([make_payload(0)])
    remove_run_folder(folder)
    assert not folder.exists()
    with pytest.raises(AssertionError, match="not a folder of payloads"):
        remove_run_folder(Path("/dev/shm"))
