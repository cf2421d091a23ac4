"""The folder of a run: what it holds, who may write in it, and which processes it lists."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.observability import ProcessListFile, RunDir, check_folder, check_run_dir
from forgeasync.schema import ConfigError
from tests.support.step_records import NOW, make_config


def test_run_dir_holds_the_config_and_every_promised_place(tmp_path: Path) -> None:
    run_dir = RunDir.create(make_config(tmp_path / "a" / "b"), "name: sums\n", NOW)
    assert run_dir.path == tmp_path / "a" / "b"
    assert run_dir.config.read_text() == "name: sums\n"
    assert run_dir.metrics.read_text() == run_dir.rollouts.read_text() == ""
    folders = {entry.name for entry in run_dir.path.iterdir() if entry.is_dir()}
    assert folders == {"checkpoints", "logs", "tensorboard"}


def test_run_dir_is_named_after_run_and_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunDir.create(make_config(), "first", NOW)
    assert first.path == Path("runs/sums-20300102-030405")
    with pytest.raises(ConfigError, match="run_dir"):
        RunDir.create(make_config(), "second", NOW)
    assert first.config.read_text() == "first"


def refusals(run_dir: Path, *, is_resumed: bool = False) -> list[str]:
    return [str(problem) for problem in check_run_dir(make_config(run_dir), is_resumed=is_resumed)]


def test_folders_that_cannot_be_a_runs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for is_resumed in (False, True):
        assert refusals(file, is_resumed=is_resumed) == [f"run_dir = {str(file)!r}: is a file; name a folder"]
        (below,) = refusals(file / "a" / "b", is_resumed=is_resumed)
        assert f"lies below {file}, which is a file" in below
    with pytest.raises(ConfigError, match="is a file"):
        RunDir.create(make_config(file), "", NOW)
    with pytest.raises(ConfigError, match="which is a file"):
        RunDir.reopen(file / "a")
    assert refusals(tmp_path / "new" / "er") == refusals(tmp_path) == []


def test_folders_that_are_not_writable_are_refused() -> None:
    # Nobody may write there, not even root.
    assert "/proc/1, where it would be made, is not writable" in refusals(Path("/proc/1/run"))[0]
    assert "it is not writable" in refusals(Path("/proc/1"))[0]
    assert next(check_folder("checkpoint.folder", Path("/proc/1/x"))).field == "checkpoint.folder"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "is not a run's folder; name one"),
        (".", "is not a run's folder; name one"),
        ("~/runs/x", "is not expanded; write the path out"),
        ("/tmp/" + 300 * "x", "File name too long"),
        ("/tmp/a\0b", "has a NUL in it"),
    ],
)
def test_paths_that_are_no_folders_are_refused(path: str, words: str) -> None:
    (problem,) = check_folder("run_dir", Path(path))
    assert words in str(problem)


@pytest.mark.parametrize(
    ("lines", "has_trained"),
    [
        ("", False),
        ('{"step": 0, "eval/accuracy": 0.5}\n', False),
        ('{"step": 0}\n{"step": 1}\n', True),
        ("{}\n", True),
        ("x", True),
    ],
)
def test_only_what_trained_keeps_the_next_start_out(tmp_path: Path, lines: str, has_trained: bool) -> None:
    first = RunDir.create(make_config(tmp_path), "first", NOW)
    first.metrics.write_text(lines)
    first.log("trainer").write_text("why it failed")
    first.ledger.write_text("of the first")
    if has_trained:
        assert "already holds a run" in refusals(tmp_path)[0]
        assert refusals(tmp_path, is_resumed=True) == []
        assert first.put_start_aside() == []
        return
    assert refusals(tmp_path) == []
    (first.checkpoints / "final").mkdir()
    assert "already holds a run" in refusals(tmp_path)[0], "a checkpoint keeps it out too"
    (first.checkpoints / "final").rmdir()
    moved = "metrics.jsonl rollouts.jsonl ledger.jsonl config.yaml logs tensorboard".split()
    assert {name.replace(".cut-1", "") for name in first.put_start_aside()} == set(moved)
    second = RunDir.create(make_config(tmp_path), "second", NOW)
    assert second.config.read_text() == "second" and second.metrics.read_text() == ""
    assert (tmp_path / "config.cut-1.yaml").read_text() == "first"
    assert (tmp_path / "logs.cut-1" / "trainer.log").read_text() == "why it failed"
    assert (tmp_path / "metrics.cut-1.jsonl").read_text() == lines


def test_a_ledger_alone_makes_room_too(tmp_path: Path) -> None:
    first = RunDir(path=tmp_path)
    first.ledger.write_text("of the first")
    assert first.put_start_aside() == ["ledger.cut-1.jsonl"] and not first.ledger.exists()


HOLD = """
import sys
from pathlib import Path
from forgeasync.observability import RunDir
RunDir(path=Path(sys.argv[1])).claim()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_live_run_is_left_alone(tmp_path: Path) -> None:
    """Its first step may be minutes away: until then only the claim tells it from a failed start."""
    (tmp_path / "metrics.jsonl").touch()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        run_dir = RunDir(path=tmp_path)
        who = rf"is in progress \(process {other.pid} on {socket.gethostname()}, since 20\d\d-"
        with pytest.raises(ConfigError, match=who):
            run_dir.put_start_aside()
        with pytest.raises(ConfigError, match=who):
            RunDir.reopen(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "run.lock"]
    finally:
        other.kill()
        other.wait()
    # It is gone, however it ended.
    assert run_dir.put_start_aside() == ["metrics.cut-1.jsonl"]


def test_the_file_has_the_processes_of_this_moment(tmp_path: Path) -> None:
    file = tmp_path / "procs.json"
    listing = ProcessListFile(file)
    listing.put("generator", 0, pid=10, host="host-0")
    listing.put("generator", 1, pid=11, host="host-0")
    listing.put("generator", 0, pid=12, host="host-0")
    listing.remove("generator", 1)
    listing.remove("generator", 1)
    read = json.loads(file.read_text())
    assert read["controller"] == os.getpid()
    assert [(one["role"], one["rank"], one["pid"]) for one in read["procs"]] == [("generator", 0, 12)]
    assert [one.pid for one in listing.entries] == [12] and list(tmp_path.iterdir()) == [file]
