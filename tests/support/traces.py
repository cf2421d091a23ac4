"""The traces of a whole run against its metrics."""

import json
from pathlib import Path

import pytest

from forgeasync.observability import Lane, State, named_lanes, shares
from forgeasync.plugins.viewer import RunReader
from tests.support.app_runs import read_lines

IDLE_ENGINE = (State.WAITING_FOR_ROOM, State.FETCHING, State.STARTING)

OUTSIDE_A_STEP = ("record", "begin a checkpoint")


def read_traces(run_dir: Path) -> dict[str, list[Lane]]:
    reader = RunReader(run_dir, with_rollouts=False)
    reader.read_all()
    assert reader.problems == []
    return named_lanes(reader.traces.lanes)


def check_traces(run_dir: Path) -> None:
    """Every proc has left a trace, and what they say is what the metrics say."""
    lanes = read_traces(run_dir)
    listed = json.loads((run_dir / "procs.json").read_text())["procs"]
    traced = {lane.opened.pid for processes in lanes.values() for lane in processes if lane.opened}
    assert {one["pid"] for one in listed} <= traced
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    (controller,) = lanes["controller"]
    recorded = {span.facts["step"]: span.begin_s for span in controller.spans if span.name == "record"}
    for line in steps:
        step, step_s, end_s = line["step"], line["time/step_s"], recorded[line["step"]]
        waited = shares([controller], end_s - step_s, end_s)[State.WAITING_FOR_BATCH]
        assert waited == pytest.approx(line["load/trainer_wait_share"], abs=0.01)
        of_step = [
            span.took_s
            for span in controller.spans
            if span.facts.get("step") == step and span.name not in OUTSIDE_A_STEP
        ]
        assert sum(of_step) == pytest.approx(step_s, rel=0.02)
    first_s, last_s = recorded[steps[0]["step"]], recorded[steps[-1]["step"]]
    busy_s = sum(
        share * (last_s - first_s)
        for name, processes in lanes.items()
        if name.startswith("generator-")
        for state, share in shares(processes, first_s, last_s).items()
        if state not in IDLE_ENGINE
    )
    # The engines are asked for their times a moment before the step is recorded.
    counted_s = steps[-1]["generator/busy_s"] - steps[0]["generator/busy_s"]
    assert busy_s == pytest.approx(counted_s, abs=0.01 * (last_s - first_s) + 0.05)
    for name, processes in lanes.items():
        whole = shares(processes, processes[0].begin_s, processes[-1].end_s)
        assert sum(whole.values()) == pytest.approx(1.0), name
    sampled = {
        span.facts["group"]: span.facts
        for name, processes in lanes.items()
        if name.startswith("generator-")
        for lane in processes
        for span in lane.spans
        if span.name == "sample group" and "response_tokens" in span.facts
    }
    for rollout in read_lines(run_dir / "rollouts.jsonl"):
        facts = sampled[rollout["group_id"]]
        assert facts["prompt_tokens"] == rollout["prompt_tokens"]
        lengths = str(facts["response_tokens"]).split()
        assert int(lengths[rollout["episode"]]) == rollout["response_tokens"]
