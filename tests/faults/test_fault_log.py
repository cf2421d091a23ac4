"""What the log of faults counts, tells and keeps."""

import json
from pathlib import Path

import pytest

from forgeasync.faults.fault_log import FaultLog, Role
from forgeasync.observability.metric_definitions import undefined


def test_faults_are_counted_by_role_and_kept_in_the_file(tmp_path: Path) -> None:
    told: list[str] = []
    file = tmp_path / "faults.jsonl"
    log = FaultLog(file, told.append)
    first = log.detected(Role.GENERATOR, "generator 2 (process 4711)", "has died")
    log.detected(Role.SCORER, "scorer (process 5)", "does not answer")
    log.recovered(first, "was replaced by process 4712")
    metrics = log.metrics()
    assert metrics["faults/detected_generator"] == metrics["faults/recovered_generator"] == 1
    assert (metrics["faults/detected_scorer"], metrics["faults/recovered_scorer"]) == (1, 0)
    assert {f"faults/{what}_{role}" for what in ("detected", "recovered") for role in Role} == set(metrics)
    assert not undefined(metrics)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["event"], line["role"], line["number"]) for line in lines] == [
        ("detected", "generator", 0),
        ("detected", "scorer", 1),
        ("recovered", "generator", 0),
    ]
    assert lines[2]["took_s"] >= 0 and lines[2]["how"] == "was replaced by process 4712"
    assert told[0] == "generator 2 (process 4711) has died" and [one.role for one in log.open] == [
        Role.SCORER
    ]


def test_a_fault_is_recovered_from_once() -> None:
    log = FaultLog()
    fault = log.detected(Role.BUFFER, "buffer", "has died")
    log.recovered(fault, "was restored")
    with pytest.raises(AssertionError):
        log.recovered(fault, "was restored")


def test_lines_that_the_disk_refuses_are_written_later(tmp_path: Path) -> None:
    file = tmp_path / "not there yet" / "faults.jsonl"
    log = FaultLog(file)
    fault = log.detected(Role.STORAGE, "the disk", "is full")
    file.parent.mkdir()
    log.recovered(fault, "has room again")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["detected", "recovered"]
