"""Weights & Biases in its offline mode, whose files are read back; one that hangs, dies or is not there."""

import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeasync.config import LoggingSection, WandbMode, WandbSection
from forgeasync.files import read_json_lines
from forgeasync.observability import MetricsWriter, WandbLog, check_wandb, wandb_log
from forgeasync.processes import is_running
from tests.support.step_records import make_step

OFFLINE = WandbSection(project="tests", mode=WandbMode.OFFLINE)


CONFIG = {"seed": 3, "model": {"path": "here"}}


def start(folder: Path, said: list[str], section: WandbSection = OFFLINE) -> WandbLog:
    files = (folder / "wandb", folder / "wandb.log")
    return WandbLog(section, files[0], log_file=files[1], name="a-run", config=CONFIG, say=said.append)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind a header of 7 bytes."""
    assert data.startswith(b":W&B")
    place, record = 7, b""
    while place + 7 <= len(data):
        left_of_block = -place % 32768
        if 0 < left_of_block < 7:
            place += left_of_block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def recorded(folder: Path) -> tuple[list[dict[str, float]], dict[str, object]]:
    """The history and the config in the one file that an offline run has left."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, float]] = []
    config: dict[str, object] = {}
    for record in map(Record.FromString, records(file.read_bytes())):
        items = record.history.item
        if items:
            history.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
        config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
    return history, config


@pytest.fixture(autouse=True)
def waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "END_S", 3600.0)


def test_every_line_is_in_the_files_of_an_offline_run(tmp_path: Path) -> None:
    said: list[str] = []
    wandb = start(tmp_path, said)
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None, wandb=wandb) as writer:
        for step in (1, 2, 3):
            writer.write(make_step(step=step))
        # Made again after a resumption: W&B would refuse a step that is older than its newest.
        writer.write(make_step(step=2, accuracy=0.5))
    assert said == [] and wandb.num_errors == 0
    history, config = recorded(tmp_path)
    assert [line["step"] for line in history] == [1, 2, 3, 2]
    for line, kept in zip(read_json_lines(tmp_path / "m.jsonl"), history, strict=True):
        assert line == {key: kept[key] for key in line}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert (tmp_path / "wandb/id").read_text().strip()


FAKE = """
import os, pathlib, time

class Settings:
    def __init__(self, **settings): pass

class Run:
    def define_metric(self, *names, **options): pass
    def finish(self): pass
    def log(self, values):
        if values["step"] == 2:
            pathlib.Path(__file__).with_name("pid").write_text(f"{os.getpid()}\\n")
            WHAT

def init(**given): return Run()
"""


def start_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], what: str) -> WandbLog:
    """Start with a package in place of wandb that does something else than taking step 2."""
    (folder / "wandb.py").write_text(FAKE.replace("WHAT", what))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return start(folder, said)


def test_one_that_hangs_costs_its_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "END_S", 0.1)
    monkeypatch.setattr(wandb_log, "MAX_KEPT_LINES", 10)
    said: list[str] = []
    wandb = start_fake(tmp_path, monkeypatch, said, "time.sleep(3600)")
    path, pid = tmp_path / "m.jsonl", tmp_path / "pid"
    with MetricsWriter(path, tensorboard_dir=None, wandb=wandb) as writer:
        for step in (1, 2):
            writer.write(make_step(step=step))
        while not (pid.exists() and pid.read_text().endswith("\n")):
            time.sleep(0.01)
        for step in range(3, 23):
            writer.write(make_step(step=step))
        assert wandb.num_errors == 10
        (words,) = said
        assert words.startswith("W&B: stopped accepting lines; the run continues")
    assert wandb.num_errors == 21, "all but the first"
    lines = read_json_lines(path)
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert (lines[0]["metrics/num_wandb_errors"], lines[-1]["metrics/num_wandb_errors"]) == (0, 10)
    assert len(said) == 1, "said once"
    assert not is_running(int(pid.read_text()))


@pytest.mark.parametrize(
    ("what", "end_s", "words"),
    [
        ("os._exit(3)", 3600.0, "has ended with exit code 3; the run continues"),
        ("time.sleep(3600)", 0.1, "has not ended within 0.1 s; `wandb sync` sends what is in {folder}"),
    ],
)
def test_one_that_dies_or_does_not_end_costs_its_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, end_s: float, words: str
) -> None:
    monkeypatch.setattr(wandb_log, "END_S", end_s)
    said: list[str] = []
    wandb = start_fake(tmp_path, monkeypatch, said, what)
    for step in (2, 3, 4):
        wandb.add({"step": step})
    wandb.close()
    (found,) = said
    assert found.startswith("W&B: ") and words.format(folder=tmp_path / "wandb") in found
    assert wandb.num_errors == 3


def test_why_it_cannot_begin_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    wandb = start(tmp_path, said, WandbSection(project="no/such", mode=WandbMode.OFFLINE))
    wandb.add({"step": 1})
    wandb.close()
    wandb.close()
    (words,) = said
    assert words.startswith("W&B: wandb.init: ") and "project" in words and "the run continues" in words
    assert wandb.num_errors == 1


def test_a_run_that_wants_it_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = LoggingSection(wandb=OFFLINE)
    assert list(check_wandb(wanted)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = check_wandb(wanted)
    assert (problem.field, problem.value) == ("logging.wandb", "tests")
    assert "pip install 'forgeasync[wandb]'" in problem.remedy
    assert list(check_wandb(LoggingSection())) == [], "nobody needs it otherwise"
