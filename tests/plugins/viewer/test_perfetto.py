"""The Chrome trace of a run, by the rules of its format."""

import json
from collections import Counter
from pathlib import Path

import pytest

from forgeasync.plugins.viewer import RunReader, write_trace
from tests.support.ledgers import ledger_text
from tests.support.viewer_runs import (
    STEP_S,
    TRACE_BEGIN_S,
    eventful_ledger,
    metrics_of,
    write_run,
    write_traces,
)


def trace_of(folder: Path, file: Path) -> list[dict]:
    reader = RunReader(folder, with_rollouts=False)
    reader.read_all()
    num_events = write_trace(reader, file)
    events = json.loads(file.read_bytes())["traceEvents"]
    assert len(events) == num_events
    check_structure(events)
    return events


def bars(events: list[dict], name: str) -> list[dict]:
    """All events but names of one of the file's processes."""
    processes = (one for one in events if one["name"] == "process_name")
    (process,) = {one["pid"] for one in processes if one["args"]["name"] == name}
    return [one for one in events if one["pid"] == process and one["ph"] != "M"]


def check_structure(events: list[dict]) -> None:
    """What the viewers need: Trace Event Format, "JSON Object Format"."""
    open_parts: Counter[tuple] = Counter()
    for event in events:
        assert event["ph"] in "MXiCbe" and isinstance(event["pid"], int) and isinstance(event["name"], str)
        assert event["ph"] == "M" or isinstance(event["ts"], int | float)
        assert event.get("dur", 0.0) >= 0.0
        if event["ph"] in "be":
            key = (event["cat"], event["id"], event["name"])
            open_parts[key] += 1 if event["ph"] == "b" else -1
            assert open_parts[key] in (0, 1)
    assert not any(open_parts.values())


def test_steps_versions_and_counters_have_their_times(tmp_path: Path) -> None:
    events = trace_of(write_run(tmp_path / "made", num_steps=3), tmp_path / "trace.json")
    steps = [one for one in bars(events, "run made") if one["ph"] == "X"]
    assert [one["name"] for one in steps] == ["step 1", "step 2", "step 3"]
    ends = [one["ts"] + one["dur"] for one in steps]
    assert ends == pytest.approx([STEP_S * 1e6 * step for step in (1, 2, 3)], abs=0.2)
    instants = [one for one in events if one["ph"] == "i"]
    assert [one["ts"] for one in instants if one["name"] == "version 2"] == [STEP_S * 2e6]
    counters = [one for one in events if one["ph"] == "C"]
    counted = [one["ts"] for one in counters if one["name"] == "reward/mean"]
    assert counted == [STEP_S * 1e6 * step for step in (1, 2, 3)]
    # Each is a metric that this version defines: a made run has all of these.
    assert len({one["name"] for one in counters}) == 14


def test_lives_of_groups_are_nested_and_those_of_one_number_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", num_steps=1)
    (folder / "ledger.jsonl").write_bytes(ledger_text(eventful_ledger()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics_of(step)) + "\n" for step in (1, 2)))
    events = bars(trace_of(folder, tmp_path / "trace.json"), "groups")
    begun = [one for one in events if one["ph"] == "b" and one["name"] == "group 2"]
    assert [one["args"]["fate"] for one in begun] == ["undone", "skipped"]
    assert len({one["id"] for one in begun}) == 2
    (lost,) = (one for one in events if one["ph"] == "b" and one["name"] == "group 1")
    assert lost["args"]["fate"] == "dropped: lost"
    own = {one["id"]: one["ts"] for one in events if one["ph"] == "b" and one["name"].startswith("group")}
    ends = {one["id"]: one["ts"] for one in events if one["ph"] == "e" and one["name"].startswith("group")}
    for part in events:
        assert own[part["id"]] <= part["ts"] <= ends[part["id"]]
    phases = [one["name"] for one in events if one["ph"] == "b" and one["id"] == begun[1]["id"]]
    assert phases == ["group 2", "sampling", "scoring", "waiting"]


def test_processes_steps_and_faults_have_one_clock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", num_steps=3)
    write_traces(folder, num_steps=3)
    fault = {"time_s": TRACE_BEGIN_S + 11.0, "event": "detected", "number": 0, "role": "generator"}
    (folder / "faults.jsonl").write_text(json.dumps({**fault, "who": "generator 0", "what": "died"}) + "\n")
    events = trace_of(folder, tmp_path / "trace.json")
    loop, generator = bars(events, "controller"), bars(events, "generator-0")
    steps = [one for one in bars(events, "run made") if one["ph"] == "X"]
    # The first step begins when its first span does, ten seconds after the first process.
    ends = [one["ts"] + one["dur"] for one in steps]
    assert ends == pytest.approx([10e6 + STEP_S * 1e6 * step for step in (1, 2, 3)], abs=1.0)
    assert [one["ts"] for one in loop if one["name"] == "train"] == [10.5e6, 12.5e6, 14.5e6]
    states = [(one["name"], one["ts"], one["dur"]) for one in generator if one["tid"] == 0]
    assert states[:2] == [("starting", 1e6, 3e6), ("computing", 4e6, 7e6)]
    assert states[2:] == [("starting", 12e6, 1e6), ("waiting for room", 13e6, 3e6)]
    rows = {one["args"]["group"]: one["tid"] for one in generator if one["name"] == "sample group"}
    assert rows == {0: 1, 1: 2}, "spans that overlap have rows of their own"
    assert [one["ts"] for one in bars(events, "faults")] == [11e6]


def test_a_run_without_a_step_has_a_trace_too(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert all(one["ph"] == "M" for one in trace_of(folder, tmp_path / "trace.json"))
