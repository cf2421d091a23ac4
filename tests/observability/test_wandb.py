"""Weights & Biases in its offline mode, whose files are read back; one that hangs, dies or is not there."""

import importlib.util
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeasync.config import LoggingSection, WandbMode, WandbSection
from forgeasync.observability import MetricsWriter, WandbLog, check_wandb, wandb_log
from forgeasync.rollouts import is_running
from tests.support.step_records import make_step

OFFLINE = WandbSection(project="tests", mode=WandbMode.OFFLINE)
LONG_S = 3600.0


def start(folder: Path, said: list[str], section: WandbSection = OFFLINE) -> WandbLog:
    return WandbLog(
        section,
        folder / "wandb",
        log_file=folder / "wandb.log",
        name="a-run",
        config={"seed": 3, "model": {"path": "here"}},
        say=said.append,
    )


def until_taken(log: WandbLog, num: int) -> None:
    """Wait until W&B has answered so many lines."""
    while log._num_answered < num:
        assert log._process.poll() is None, log._num_answered
        log._exchange()
        time.sleep(0.05)


BLOCK = 32768


def records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind a header of 7 bytes."""
    assert data.startswith(b":W&B")
    place, record = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
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
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            history.append({key: json.loads(value) for key, value in items.items()})
        elif record.WhichOneof("record_type") == "run":
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
    return history, config


def test_every_line_is_in_the_files_of_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_log, "END_S", LONG_S)
    said: list[str] = []
    wandb = start(tmp_path, said)
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None, wandb=wandb) as writer:
        for step in (1, 2, 3):
            writer.write(make_step(step=step).to_dict())
        # Made again after a resumption: W&B would refuse a step that is older than its newest.
        writer.write(make_step(step=2, accuracy=0.5).to_dict())
    assert said == [] and wandb.num_errors == 0
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    history, config = recorded(tmp_path)
    assert [line["step"] for line in history] == [1, 2, 3, 2]
    for line, kept in zip(lines, history, strict=True):
        assert line == {key: kept[key] for key in line}
    assert config["seed"] == 3 and config["model"] == {"path": "here"}
    assert not is_running(wandb._process.pid)
    assert (tmp_path / "wandb/id").read_text().strip()


def test_one_that_dies_or_stands_still_costs_its_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    wandb = start(tmp_path, said)
    path = tmp_path / "m.jsonl"
    monkeypatch.setattr(wandb_log, "MAX_KEPT_BYTES", 1 << 14)
    monkeypatch.setattr(wandb_log, "END_S", 1.0)
    with MetricsWriter(path, tensorboard_dir=None, wandb=wandb) as writer:
        writer.write(make_step(step=1).to_dict())
        until_taken(wandb, 1)
        os.kill(wandb._process.pid, signal.SIGSTOP)
        # More than the pipe and what is kept have room for.
        for step in range(2, 200):
            writer.write(make_step(step=step).to_dict())
        num_lost = wandb.num_errors
        assert 0 < num_lost < 198 and len(said) == 1 and "does not take lines any more" in said[0]
        os.kill(wandb._process.pid, signal.SIGKILL)
        wandb._process.wait()
        writer.write(make_step(step=200).to_dict())
        assert wandb.num_errors == 199, "all but the first"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 201))
    assert lines[0]["metrics/num_wandb_errors"] == 0 and lines[-1]["metrics/num_wandb_errors"] == 199
    assert len(said) == 1, "said once"


def test_why_it_cannot_begin_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "END_S", LONG_S)
    said: list[str] = []
    wandb = start(tmp_path, said, WandbSection(project="no/such", mode=WandbMode.OFFLINE))
    wandb.add({"step": 1})
    wandb.close()
    wandb.close()
    (words,) = said
    assert words.startswith("W&B: wandb.init: ") and "project" in words and "the run goes on" in words
    assert wandb.num_errors == 1


def test_a_run_that_wants_it_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = LoggingSection(wandb=OFFLINE)
    assert list(check_wandb(wanted)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = check_wandb(wanted)
    assert (problem.field, problem.value) == ("logging.wandb", "tests")
    assert "pip install 'forgeasync[wandb]'" in problem.remedy
    assert list(check_wandb(LoggingSection())) == [], "nobody needs it otherwise"
