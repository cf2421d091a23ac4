"""benchmarks/chaos.py: what it plans, when it injects, and what it finds in what a run has left."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import measured_band
from chaos_faults import KINDS, Injected, Injector, Kind, Planned, plan
from chaos_report import Evidence, accuracy_of, effective_share, first_difference, rows

from forgeasync.config.load import dump_config
from forgeasync.faults.fault_log import Role
from tests.support.models import write_random_model
from tests.support.runs import tiny_config
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).parents[2]


def test_a_plan_is_the_seeds_and_spreads_faults_over_the_run() -> None:
    faults = plan(3, 200, ["scorer", "environment"], steps_per_fault=10)
    assert faults == plan(3, 200, ["scorer", "environment"], steps_per_fault=10)
    assert faults != plan(4, 200, ["scorer", "environment"], steps_per_fault=10)
    assert {(one.role, one.kind) for one in faults} == {
        (role, kind) for role in ("scorer", "environment") for kind in KINDS[role]
    }
    assert [(one.at_step - 1) // 10 for one in faults] == list(range(200)), "one in every ten steps"
    with pytest.raises(ValueError, match=r"--role oracle: must be one of scorer, "):
        plan(3, 1, ["oracle"], steps_per_fault=10)
    assert set(KINDS) <= {role.value for role in Role}, "as faults.jsonl names them"


def write_lines(file: Path, *lines: object) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_fault_waits_for_its_step_and_for_the_recovery_of_its_role(tmp_path: Path) -> None:
    metrics, events, procs = (tmp_path / name for name in ("metrics.jsonl", "faults.jsonl", "procs.json"))
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    try:
        faults = [
            Planned(role="scorer", kind=Kind.SIGSTOP, at_step=2, pause_share=0.0, which=0.0),
            Planned(role="scorer", kind=Kind.SIGKILL, at_step=3, pause_share=0.0, which=0.99),
        ]
        injector = Injector(tmp_path, faults, tmp_path / "witness.jsonl")
        injector.look()
        listed = [{"role": "scorer", "rank": rank, "pid": one.pid} for rank, one in enumerate(processes)]
        procs.write_text(json.dumps({"controller": os.getpid(), "procs": listed}))
        write_lines(metrics, {"step": 0}, {"step": 1, "time/step_s": 1.0})
        injector.look()
        assert not injector.injected, "its step is not done"
        write_lines(metrics, {"step": 2, "time/step_s": 1.0})
        injector.look()
        (first,) = injector.injected
        assert (first.pid, first.rank, first.kind) == (processes[0].pid, 0, Kind.SIGSTOP)
        _, status = os.waitpid(processes[0].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        write_lines(metrics, {"step": 7, "time/step_s": 1.0})
        injector.look()
        write_lines(events, {"event": "detected", "role": "scorer", "number": 0})
        injector.look()
        write_lines(events, {"event": "recovered", "role": "environment", "number": 0})
        injector.look()
        assert len(injector.injected) == 1, "the role has not recovered"
        write_lines(events, {"event": "recovered", "role": "scorer", "number": 0})
        injector.look()
        assert processes[2].wait(60) == -signal.SIGKILL
        injector.look()
        witnessed = [json.loads(line) for line in (tmp_path / "witness.jsonl").read_text().splitlines()]
        assert witnessed == [dataclasses.asdict(one) for one in injector.injected]
        assert [one["pid"] for one in witnessed] == [processes[0].pid, processes[2].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def good() -> Evidence:
    """Two faults of the scorer and one of an environment worker, all recovered from."""
    kinds = [("scorer", Kind.SIGKILL), ("environment", Kind.SIGSTOP), ("scorer", Kind.SIGSTOP)]
    planned = [
        Planned(role=role, kind=kind, at_step=number, pause_share=0.5, which=0.5)
        for number, (role, kind) in enumerate(kinds)
    ]
    injected = [
        Injected(time_s=100.0 * number, role=role, rank=0, kind=kind, pid=7)
        for number, (role, kind) in enumerate(kinds)
    ]
    events: list[dict[str, Any]] = []
    for number, (role, _) in enumerate(kinds):
        about = {"number": number, "role": role}
        events += [
            {"event": "detected", "time_s": 100.0 * number + 1 + number, **about},
            {"event": "recovered", "time_s": 100.0 * number + 10 + number, **about},
        ]
    steps: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1}]
    for step in (1, 2, 3, 4):
        steps.append({"step": step, "time/step_s": 2.0, "time/elapsed_s": 2.5 * step})
        for what in ("detected", "recovered"):
            steps[-1] |= {f"faults/{what}_scorer": 2.0, f"faults/{what}_environment": 1.0}
    steps[-1]["eval/accuracy"] = 0.5
    return Evidence(
        planned=planned,
        injected=injected,
        events=events,
        steps=steps,
        rollouts=[
            {"step": step, "group_id": 2 * step + group, "episode": episode, "agent": "a"}
            for step in (1, 2, 3, 4)
            for group in (0, 1)
            for episode in (0, 1)
        ],
        max_steps=4,
        groups_per_step=2,
        exit_code=0,
        ledger_problem=None,
        band=(0.4, 0.6),
        left=(),
    )


def test_nothing_differs_where_all_counts_agree() -> None:
    assert first_difference(good()) is None
    assert first_difference(dataclasses.replace(good(), band=None)) is None


def _with(**changes: object) -> Callable[[Evidence], Evidence]:
    return lambda evidence: dataclasses.replace(evidence, **changes)


def _without_event(number: int) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        events = [one for place, one in enumerate(evidence.events) if place != number]
        return dataclasses.replace(evidence, events=events)

    return change


def _last_step(**values: float) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        named = {key.replace("__", "/"): value for key, value in values.items()}
        return dataclasses.replace(evidence, steps=[*evidence.steps[:-1], evidence.steps[-1] | named])

    return change


def _rollout(place: int, **values: int) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        rollouts = [one | values if number == place else one for number, one in enumerate(evidence.rollouts)]
        return dataclasses.replace(evidence, rollouts=rollouts)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with(exit_code=1), "exit code 1"),
        # Injection switched off.
        (_with(injected=(), events=()), "environment: 1 faults were to be injected, 0 were injected"),
        (lambda one: dataclasses.replace(one, injected=one.injected[:2]), "scorer: 2 .* 1 were injected"),
        (_without_event(0), "scorer: 2 .* 1 were detected"),
        (_without_event(5), "scorer: 2 .* 1 were recovered"),
        (
            lambda one: dataclasses.replace(
                one, events=[*one.events, {"event": "detected", "role": "buffer", "number": 3, "time_s": 1.0}]
            ),
            "buffer: 0 .* 1 were detected",
        ),
        (lambda one: dataclasses.replace(one, steps=one.steps[:-1]), "has steps .* not 1 to 4"),
        (
            lambda one: dataclasses.replace(one, steps=[*one.steps, one.steps[-1]]),
            "has steps .* not 1 to 4",
        ),
        (_last_step(faults__recovered_scorer=1.0), "faults/recovered_scorer = 1, and 2"),
        (_rollout(4, step=1), "group 4 was trained on in steps 1 and 2"),
        (_rollout(5, episode=0), "episode 0 of group 4 was trained on twice in step 2"),
        (lambda one: dataclasses.replace(one, rollouts=one.rollouts[:-2]), "step 4 was trained on 1 groups"),
        (_with(ledger_problem="prompt 7 has two ends"), "apps.verify: prompt 7 has two ends"),
        (_last_step(**{"eval__accuracy": 0.39}), "accuracy is 0.39, .* 0.4 to 0.6"),
        (_last_step(**{"eval__accuracy": float("nan")}), "accuracy is nan"),
        (_with(left=("process 12",)), "left behind: process 12"),
    ],
)
def test_whatever_differs_is_said(change: Callable[[Evidence], Evidence], said: str) -> None:
    import re

    difference = first_difference(change(good()))
    assert difference is not None and re.search(said, difference), difference


def test_times_are_counted_from_the_injection_by_role_and_kind() -> None:
    evidence = good()
    by_kind = {(row.role, row.kind): row for row in rows(evidence.injected, evidence.events)}
    assert set(by_kind) == {("scorer", "sigkill"), ("environment", "sigstop"), ("scorer", "sigstop")}
    kill, stop = by_kind["scorer", "sigkill"], by_kind["scorer", "sigstop"]
    assert (kill.detection_p50_s, kill.recovery_p95_s) == (1.0, 10.0)
    assert (stop.detection_p50_s, stop.recovery_p50_s) == (3.0, 12.0)
    # Without the last recovery.
    (*_, unfinished) = rows(evidence.injected, evidence.events[:-1])
    assert (unfinished.num_injected, unfinished.num_detected, unfinished.num_recovered) == (1, 1, 0)
    assert unfinished.recovery_p50_s is None


def test_effective_time_and_bands() -> None:
    steps = good().steps
    assert effective_share(steps, undisturbed_step_s=2.0) == pytest.approx(8.0 / 10.0)
    assert effective_share(steps, undisturbed_step_s=3.0) == 1.0
    assert accuracy_of(steps) == 0.5 and accuracy_of(steps[:3]) is None
    assert measured_band([0.5, 0.6]) == pytest.approx((0.4, 0.7))
    assert measured_band([0.5]) == pytest.approx((0.48, 0.52))


@starts(Starts.PROCS)
def chaos(config: Path, out: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "benchmarks/chaos.py", "--config", str(config), "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_scorer_that_is_killed_and_stopped_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_config(write_random_model(tmp_path / "model"))))
    out = tmp_path / "out"
    short = ("--faults", "3", "--seed", "1", "--role", "scorer", "--steps-per-fault", "5")
    code, said = chaos(file, out, *short)
    assert code == 0 and "nothing was lost" in said, said
    witnessed = [json.loads(line) for line in (out / "witness.jsonl").read_text().splitlines()]
    assert len({one["pid"] for one in witnessed}) == 3, "each has met another process"
    assert not any(psutil.pid_exists(one["pid"]) for one in witnessed)
    code, said = chaos(file, tmp_path / "off", "--off", *short)
    assert code == 1 and "scorer: 3 faults were to be injected, 0 were injected" in said, said
