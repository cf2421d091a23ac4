"""What the log of faults counts, tells and keeps."""

from pathlib import Path

import pytest

from forgeasync.files import read_json_lines
from forgeasync.observability import FaultLog, Role, undefined


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
    lines = read_json_lines(file)
    numbers = [(line["event"], line["role"], line["number"]) for line in lines]
    assert numbers == [("detected", "generator", 0), ("detected", "scorer", 1), ("recovered", "generator", 0)]
    assert lines[2]["took_s"] >= 0 and lines[2]["how"] == "was replaced by process 4712"
    assert told[0] == "generator 2 (process 4711) has died"
    assert [one.role for one in log.open] == [Role.SCORER]


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
    assert [line["event"] for line in read_json_lines(file)] == ["detected", "recovered"]


def test_a_later_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Numbers stay unique, counts are those of the run, and what had failed before comes back."""
    file = tmp_path / "faults.jsonl"
    first = FaultLog(file)
    first.recovered(first.detected(Role.SCORER, "scorer (process 5)", "has died"), "was replaced")
    first.detected(Role.GENERATOR, "generator 2 (process 6)", "has died")
    FaultLog(file).detected(Role.CONTROLLER, "controller (process 4)", "was killed by SIGKILL")
    with file.open("a") as torn:
        torn.write('{"time_s": 1, "ev')
    told: list[str] = []
    later = FaultLog(file, told.append)
    assert [fault.role for fault in later.open] == [Role.GENERATOR, Role.CONTROLLER]
    new = later.detected(Role.TRAINER, "trainer rank 0 (process 9)", "has died")
    later.recover_earlier("came back as process 8")
    later.recover_earlier("came back as process 8")
    assert later.open == (new,) and new.number == 3
    metrics = later.metrics()
    for role, num_recovered in {"scorer": 1, "generator": 1, "controller": 1, "trainer": 0}.items():
        assert metrics[f"faults/detected_{role}"] == 1
        assert metrics[f"faults/recovered_{role}"] == num_recovered
    lines = read_json_lines(file)
    assert [line["number"] for line in lines if line["event"] == "detected"] == [0, 1, 2, 3]
    assert [line["number"] for line in lines if line["event"] == "recovered"] == [0, 1, 2]
    assert 0 <= lines[-1]["took_s"] < 60
    assert told[-1].startswith("controller (process 4) came back as process 8 after ")


@pytest.mark.parametrize("line", ["{", "{}", '{"event": "detected", "role": "nobody"}', "7"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "faults.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"line 1 is no line of faults\.jsonl"):
        FaultLog(file)
