"""The command line of apps.view."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from apps.view import main
from forgeasync.plugins.viewer import DEMO_RUN
from tests.support.viewer_runs import write_run


def test_the_status_is_a_line_of_json_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name, num_steps=2)) for name in ("a", "b")]
    assert main([*folders, "--status", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["run"], one["step"]) for one in found] == [("a", 2), ("b", 2)]
    assert main([folders[0], "--status"]) == 0
    assert capsys.readouterr().out.startswith("a: unknown (has no run.lock)\n  step 2 of 2, last written ")


@pytest.mark.parametrize("name", ["none", "file", "empty"])
def test_a_folder_of_no_run_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "refused: " in said and "must be the folder of a run" in said


@pytest.mark.parametrize(
    "given",
    [
        *("", "a --json", "a --no-traces", "a --port 65536", "a --port x"),
        *("a b --perfetto x", "a --perfetto x --status"),
    ],
)
def test_what_does_not_go_together_is_refused(given: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2


def test_a_trace_is_written_or_it_is_said_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path / "a", num_steps=2))
    assert main([folder, "--perfetto", str(tmp_path / "trace.json")]) == 0
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert main([folder, "--perfetto", str(tmp_path / "none" / "trace.json")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    # Takes no byte.
    (tmp_path / ".full.json.partial").symlink_to("/dev/full")
    assert main([folder, "--perfetto", str(tmp_path / "full.json")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "trace.json"]


def test_a_port_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main([str(write_run(tmp_path / "a", num_steps=1)), "--port", str(port)]) == 2
    assert f"refused: --port = {port}: is taken" in capsys.readouterr().err


def test_traces_are_left_unread_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", num_steps=1)
    (folder / "logs").mkdir()
    (folder / "logs" / "x.trace.jsonl").write_text("no trace\n")

    def problems(*more: str) -> list[str]:
        assert main([str(folder), "--status", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["problems"]

    assert len(problems()) == 1 and problems("--no-traces") == []


def test_the_recorded_run_can_be_read_by_this_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", "--status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["problems"], found["num_faults"]) == (16, [], 1)
    assert found["groups"]["trained"] == 64
    assert sum(file.stat().st_size for file in DEMO_RUN.iterdir()) < 200_000


def test_it_serves_until_it_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path / "a", num_steps=1))
    answers: list[bytes] = []

    def visit() -> None:
        address = ""
        while not address.startswith("http"):
            time.sleep(0.02)
            address += capsys.readouterr().out
        answers.append(urllib.request.urlopen(address.strip(), timeout=300.0).read())
        os.kill(os.getpid(), signal.SIGTERM)

    visitor = threading.Thread(target=visit)
    visitor.start()
    assert main([folder, "--port", "0"]) == 0
    visitor.join()
    assert b"<title>forgeasync runs</title>" in answers[0]
