"""benchmarks/chaos.py: what it plans, when it injects, and what it finds in what a run has left."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos import measured_band
from chaos_faults import (
    HOST,
    KINDS,
    MOMENTS,
    STORAGE,
    SUPERVISED,
    Injected,
    Kind,
    Moment,
    Planned,
    plan,
)
from chaos_injector import Injector
from chaos_match import match
from chaos_orders import Orders
from chaos_report import (
    Evidence,
    accuracy_of,
    effective_share,
    evaluation_s,
    first_difference,
    rows,
    step_median_s,
)
from chaos_run import is_of_another_run, marks_in

from forgeasync.faults.fault_log import Role

ALL_MOMENTS = tuple(Moment)


def test_a_plan_is_the_seeds_and_spreads_faults_over_the_run() -> None:
    roles = [role for role in KINDS if role != HOST]
    faults = plan(3, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert faults == plan(3, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert faults != plan(4, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert [(one.at_step - 1) // 10 for one in faults] == list(range(3000)), "one in every ten steps"
    assert {(one.role, one.kind) for one in faults} == {
        (role, kind) for role in roles for kind in KINDS[role]
    }
    assert all(one.kind in MOMENTS[one.moment] for one in faults)
    assert {one.moment for one in faults[1:-1]} == set(Moment) - {Moment.START, Moment.SHUTDOWN}
    assert set(KINDS) == {role.value for role in Role}, "as faults.jsonl names them"


def test_a_run_begins_and_ends_once() -> None:
    firsts, lasts = set(), set()
    for seed in range(60):
        first, _, last = plan(seed, 3, ["scorer", "controller"], steps_per_fault=5, moments=ALL_MOMENTS)
        firsts.add(first.moment)
        lasts.add(last.moment)
    assert Moment.START in firsts and Moment.SHUTDOWN not in firsts
    assert Moment.SHUTDOWN in lasts and Moment.START not in lasts


def test_what_ends_a_run_is_left_out_where_nobody_starts_it_again() -> None:
    faults = plan(0, 300, ["scorer", "trainer"], steps_per_fault=5, moments=ALL_MOMENTS)
    assert not {one.moment for one in faults} & {Moment.START, Moment.RESUME}
    assert "buffer" in SUPERVISED


@pytest.mark.parametrize(
    ("roles", "kinds", "said"),
    [
        (["oracle"], tuple(Kind), "--role oracle: must be one of scorer, "),
        (["scorer"], (Kind.HUNG_COLLECTIVE,), "--role scorer: it has none of the kinds hung_collective"),
        (["storage"], (Kind.SIGKILL,), "--role storage: it has none of the kinds sigkill"),
    ],
)
def test_what_cannot_be_planned_is_refused(roles: list[str], kinds: tuple[Kind, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(3, 1, roles, steps_per_fault=10, moments=ALL_MOMENTS, kinds=kinds)


def write_lines(file: Path, *lines: object) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def planned(role: str, kind: Kind, *, at_step: int, **more: Any) -> Planned:
    return Planned(
        **({"role": role, "kind": kind, "at_step": at_step, "pause_share": 0.0, "which": 0.0} | more)
    )


def test_a_fault_waits_for_its_step_and_for_the_recovery_of_its_role(tmp_path: Path) -> None:
    metrics, events, procs = (tmp_path / name for name in ("metrics.jsonl", "faults.jsonl", "procs.json"))
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    try:
        faults = [
            planned("scorer", Kind.SIGSTOP, at_step=2),
            planned("scorer", Kind.SIGKILL, at_step=3, which=0.99),
        ]
        injector = Injector(tmp_path, faults, tmp_path / "witness.jsonl", orders=Orders(tmp_path / "orders"))

        def look() -> None:
            for _ in range(5):
                injector.look()

        look()
        listed = [{"role": "scorer", "rank": rank, "pid": one.pid} for rank, one in enumerate(processes)]
        procs.write_text(json.dumps({"controller": os.getpid(), "procs": listed}))
        write_lines(metrics, {"step": 0}, {"step": 1, "time/step_s": 1.0})
        look()
        assert not injector.injected, "its step is not done"
        write_lines(metrics, {"step": 2, "time/step_s": 1.0})
        look()
        (first,) = injector.injected
        assert (first.pid, first.rank, first.kind) == (processes[0].pid, 0, Kind.SIGSTOP)
        _, status = os.waitpid(processes[0].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        write_lines(metrics, {"step": 7, "time/step_s": 1.0})
        look()
        noticed = {"event": "detected", "role": "scorer", "number": 0, "time_s": first.time_s + 9}
        write_lines(events, noticed)
        look()
        write_lines(events, noticed, {"event": "recovered", "role": "scorer", "number": 1, "time_s": 0.0})
        look()
        assert len(injector.injected) == 1, "the role has not recovered"
        recovered = {"event": "recovered", "role": "scorer", "number": 0, "time_s": first.time_s + 20}
        write_lines(events, noticed, recovered)
        look()
        assert processes[2].wait(60) == -signal.SIGKILL
        look()
        witnessed = [json.loads(line) for line in (tmp_path / "witness.jsonl").read_text().splitlines()]
        assert witnessed == [dataclasses.asdict(one) for one in injector.injected]
        assert [one["pid"] for one in witnessed] == [processes[0].pid, processes[2].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_another_roles_fault_follows_once_the_one_before_was_detected(tmp_path: Path) -> None:
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    try:
        roles = ("generator", "scorer", "controller")
        injector = Injector(
            tmp_path,
            [planned(role, Kind.SIGKILL, at_step=1) for role in roles],
            tmp_path / "witness.jsonl",
            orders=Orders(tmp_path / "orders"),
        )
        listed = [
            {"role": role, "rank": 0, "pid": one.pid} for role, one in zip(roles, processes, strict=True)
        ]
        procs = {"controller": processes[2].pid, "procs": listed[:2]}
        (tmp_path / "procs.json").write_text(json.dumps(procs))
        write_lines(tmp_path / "metrics.jsonl", {"step": 1, "time/step_s": 1.0})
        events: list[dict[str, Any]] = []

        def look() -> list[str]:
            write_lines(tmp_path / "faults.jsonl", *events)
            for _ in range(5):
                injector.look()
            return [one.role for one in injector.injected]

        assert look() == ["generator"]
        events.append({"event": "detected", "role": "generator", "number": 0, "time_s": 1e12})
        assert look() == ["generator", "scorer"], "another role need not wait for the recovery"
        events.append({"event": "detected", "role": "scorer", "number": 1, "time_s": 1e12})
        assert look() == ["generator", "scorer", "controller"]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_fault_within_an_evaluation_waits_for_one(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        fault = planned("scorer", Kind.SIGKILL, at_step=1, moment=Moment.EVALUATION)
        injector = Injector(tmp_path, [fault], tmp_path / "w.jsonl", orders=Orders(tmp_path / "orders"))
        listed = [{"role": "scorer", "rank": 0, "pid": process.pid}]
        (tmp_path / "procs.json").write_text(json.dumps({"controller": 1, "procs": listed}))
        write_lines(tmp_path / "metrics.jsonl", {"step": 3, "time/step_s": 1.0})
        for said in (
            "t evaluating version 0 on 8 problems",
            "t evaluating version 3 on 8 problems\nt step  3/9  reward 1  eval 0.5",
            "t evaluating with 8 responses beside training\nt evaluation begun: held-out accuracy 1",
        ):
            (tmp_path / "run.log").write_text(f"{said}\nt step  4/9  reward 1\n")
            for _ in range(5):
                injector.look()
            assert process.poll() is None
        with (tmp_path / "run.log").open("a") as file:
            file.write("t evaluating with 8 responses beside training\nt step  5/9  reward 1\n")
        for _ in range(5):
            injector.look()
        assert process.wait(60) == -signal.SIGKILL
        assert injector.injected[0].moment is Moment.EVALUATION
    finally:
        process.kill()
        process.wait()


OBEDIENT = """
import sys, time
sys.orig_argv = ["python", "-m", "apps.grpo"]
import sitecustomize
sitecustomize._start()
{body}
"""


def obedient(tmp_path: Path, body: str) -> "tuple[subprocess.Popen[str], Orders]":
    """A process that takes orders, as if it were one of a run."""
    orders = Orders(tmp_path / "orders")
    process = subprocess.Popen(
        [sys.executable, "-c", OBEDIENT.format(body=body)],
        env=os.environ | orders.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, orders


def test_a_process_ends_itself_when_ordered_to(tmp_path: Path) -> None:
    process, orders = obedient(tmp_path, "time.sleep(1000)")
    try:
        order = orders.give(process.pid, "exit")
        assert process.wait(120) == 13
        taken = order.taken()
        assert taken is not None and taken["time_s"] > 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("kind", "said"), [("full_disk", "28"), ("failing_disk", "5")])
def test_a_disk_refuses_what_is_below_its_folder_until_the_order_is_ended(
    tmp_path: Path, kind: str, said: str
) -> None:
    body = f"""
from pathlib import Path
from forgeasync.faults.appended_file import AppendedFile
folder = Path({str(tmp_path / "disk")!r})
folder.mkdir()
inside, outside = AppendedFile.open(folder / "lines"), AppendedFile.open(Path({str(tmp_path)!r}) / "lines")
refused = None
print("ready", flush=True)
while True:
    time.sleep(0.01)
    outside.write(b"x")
    try:
        inside.write(b"x")
        (folder / "other").write_text("x")
    except OSError as error:
        refused = error.errno
    else:
        if refused is not None:
            print(refused, inside.num_kept_bytes, flush=True)
            break
"""
    process, orders = obedient(tmp_path, body)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        order = orders.give(process.pid, kind, folder=str(tmp_path / "disk"))
        while order.taken() is None:
            assert process.poll() is None
        while (tmp_path / "lines").stat().st_size < 20:
            assert process.poll() is None
        size = (tmp_path / "disk" / "lines").stat().st_size
        while (tmp_path / "lines").stat().st_size < 40:
            assert process.poll() is None
        assert (tmp_path / "disk" / "lines").stat().st_size == size, "nothing is written"
        order.end()
        assert process.stdout.readline() == f"{said} 0\n"
    finally:
        process.kill()
        process.communicate()


def test_orders_are_for_processes_of_roles_only(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    code = "import threading; print([one.name for one in threading.enumerate()])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | orders.environment(), capture_output=True, text=True
    )
    assert done.stdout == "['MainThread']\n", "processes that fork must have no thread"


def test_semaphores_of_other_runs_are_theirs(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    assert marks_in(lock) == set()
    lock.write_text('{"pid": 1, "mark": "0a"}')
    own, other = (Path(f"/dev/shm/sem.forgeasync-{mark}-xyz") for mark in ("0a", "0b"))
    assert not is_of_another_run(own, marks_in(lock)) and is_of_another_run(other, marks_in(lock))
    assert not is_of_another_run(Path("/dev/shm/sem.mp-xyz"), marks_in(lock))
    lock.write_text('{"pid": 1')
    assert marks_in(lock) == set(), "it is just being written"


def good() -> Evidence:
    """Two faults of the scorer, one of an environment worker, and a delay that nobody noticed."""
    kinds = [
        ("scorer", Kind.SIGKILL),
        ("environment", Kind.SIGSTOP),
        ("scorer", Kind.SIGSTOP),
        ("scorer", Kind.DELAYED_MESSAGES),
    ]
    injected = [
        Injected(
            number=number,
            time_s=100.0 * number,
            role=role,
            rank=0,
            kind=kind,
            moment=Moment.STEP,
            pid=7,
            words="num_messages: 3" if kind is Kind.DELAYED_MESSAGES else "",
        )
        for number, (role, kind) in enumerate(kinds)
    ]
    events: list[dict[str, Any]] = []
    for number, (role, _) in enumerate(kinds[:3]):
        about = {"number": number, "role": role, "who": f"the {role}", "what": "has died"}
        events += [
            {"event": "detected", "time_s": 100.0 * number + 1 + number, **about},
            {"event": "recovered", "time_s": 100.0 * number + 10 + number, **about},
        ]
    steps: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1}]
    for step in (1, 2, 3, 4):
        steps.append({"step": step, "time/step_s": 2.0, "time/elapsed_s": 2.5 * step})
        for what in ("detected", "recovered"):
            counted = {f"faults/{what}_scorer": 2.0, f"faults/{what}_environment": 1.0}
            steps[-1] |= counted | {f"faults/{what}_buffer": 0.0}
    steps[-1] |= {"eval/accuracy": 0.5, "time/eval_s": 0.5, "time/step_s": 2.5}
    return Evidence(
        planned=[planned(role, kind, at_step=number) for number, (role, kind) in enumerate(kinds)],
        injected=injected,
        events=events,
        steps=steps,
        rollouts=[
            {"step": step, "group_id": 2 * step + group, "episode": episode, "agent": "a"}
            for step in (1, 2, 3, 4)
            for group in (0, 1)
            for episode in (0, 1)
        ],
        ledger=[
            *({"event": "trained", "step": step, "groups": [2 * step, 2 * step + 1]} for step in (1, 2)),
            {"event": "trained", "step": 3, "groups": [100, 101]},
            {"event": "resumed", "step": 2},
            *({"event": "trained", "step": step, "groups": [2 * step, 2 * step + 1]} for step in (3, 4)),
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


def _one_more(role: str, time_s: float) -> Callable[[Evidence], Evidence]:
    event = {"event": "detected", "role": role, "number": 3, "time_s": time_s, "who": "it", "what": "died"}
    return lambda evidence: dataclasses.replace(evidence, events=[*evidence.events, event])


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


def _injected(place: int, **values: object) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        injected = list(evidence.injected)
        injected[place] = dataclasses.replace(injected[place], **values)
        return dataclasses.replace(evidence, injected=injected)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with(exit_code=1), "exit code 1"),
        # Injection switched off.
        (_with(injected=(), events=()), "scorer: 3 faults were to be injected, 0 were injected"),
        (lambda one: dataclasses.replace(one, injected=one.injected[:2]), "scorer: 3 .* 1 were injected"),
        (_without_event(0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (_without_event(2), r"environment: fault 2 \(sigstop, step\) was not detected"),
        (_without_event(5), r"scorer: fault 3 \(sigstop, step\) was not recovered"),
        (_one_more("buffer", 1.0), "buffer: nobody has injected this: it died"),
        # Within a delay that is below the heartbeat.
        (_one_more("scorer", 301.0), "scorer: nobody has injected this"),
        (_one_more("storage", 301.0), "storage: nobody has injected this"),
        (_injected(3, words="num_messages: 0"), "has held no message"),
        (_injected(0, time_s=50.0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (lambda one: dataclasses.replace(one, steps=one.steps[:-1]), "has steps .* not 1 to 4"),
        (
            lambda one: dataclasses.replace(one, steps=[*one.steps, one.steps[-1]]),
            "has steps .* not 1 to 4",
        ),
        (_last_step(faults__recovered_scorer=1.0), "faults/recovered_scorer = 1, and faults.jsonl has 2"),
        (_last_step(faults__detected_buffer=1.0), "faults/detected_buffer = 1, and faults.jsonl has 0"),
        (_rollout(4, step=1), "group 4 was trained on in steps 1 and 2"),
        (_rollout(5, episode=0), "episode 0 of group 4 was trained on twice in step 2"),
        (lambda one: dataclasses.replace(one, rollouts=one.rollouts[:-2]), "step 4 was trained on 1 groups"),
        (
            lambda one: dataclasses.replace(one, ledger=one.ledger[:-1]),
            r"step 4 was trained on other groups than in the ledger: \[8, 9\] are in one only",
        ),
        (
            lambda one: dataclasses.replace(one, ledger=[*one.ledger, {"event": "resumed", "step": 3}]),
            "step 4 was trained on other groups than in the ledger",
        ),
        (_with(ledger_problem="prompt 7 has two ends"), "apps.verify: prompt 7 has two ends"),
        (_with(witness_problem="its row says 2 times"), "the counting witness: its row says 2 times"),
        (_last_step(**{"eval__accuracy": 0.39}), "accuracy is 0.39, .* 0.4 to 0.6"),
        (_last_step(**{"eval__accuracy": float("nan")}), "accuracy is nan"),
        (_with(left=("process 12",)), "left behind: process 12"),
    ],
)
def test_whatever_differs_is_said(change: Callable[[Evidence], Evidence], said: str) -> None:
    difference = first_difference(change(good()))
    assert difference is not None and re.search(said, difference), difference


def _fault(role: str, kind: Kind, moment: Moment, time_s: float) -> Injected:
    return Injected(number=0, time_s=time_s, role=role, rank=0, kind=kind, moment=moment, pid=7)


def _noticed(role: str, time_s: float, number: int) -> dict[str, Any]:
    return {"event": "detected", "role": role, "time_s": time_s, "number": number}


def test_a_loss_while_nobody_looks_after_its_role_may_be_the_controllers() -> None:
    events = [_noticed("controller", 12.0, 0), _noticed("controller", 30.0, 1)]
    resumed = [
        _fault("controller", Kind.SIGKILL, Moment.RESUME, 10.0),
        _fault("trainer", Kind.SIGKILL, Moment.RESUME, 20.0),
    ]
    matches, extra = match(resumed, events)
    assert [one.detected for one in matches] == events and not extra
    at_a_step = [resumed[0], dataclasses.replace(resumed[1], moment=Moment.STEP)]
    matches, extra = match(at_a_step, events)
    assert matches[1].detected is None and extra == [events[1]]
    # Its own role comes first.
    own = [*events[:1], _noticed("trainer", 40.0, 1), _noticed("controller", 30.0, 2)]
    matches, extra = match(resumed, own)
    assert matches[1].detected == own[1] and extra == [own[2]]


def test_what_an_outage_delays_belongs_to_it() -> None:
    outage = _fault(STORAGE, Kind.FULL_DISK, Moment.STEP, 10.0)
    events = [_noticed(STORAGE, 12.0, 0), _noticed(STORAGE, 20.0, 1)]
    matches, extra = match([outage], events)
    assert matches[0].detected == events[0] and not extra
    early = [_noticed(STORAGE, 5.0, 0)]
    matches, extra = match([outage], early)
    assert matches[0].detected is None and extra == early


def test_what_dies_at_the_very_end_may_not_be_missed() -> None:
    ((scorer,), _) = match([_fault("scorer", Kind.SIGKILL, Moment.SHUTDOWN, 1.0)], [])
    ((controller,), _) = match([_fault("controller", Kind.SIGKILL, Moment.SHUTDOWN, 1.0)], [])
    assert not scorer.is_expected and controller.is_expected


def test_times_are_counted_from_the_injection_by_role_and_kind() -> None:
    evidence = good()
    by_kind = {(row.role, row.kind): row for row in rows(match(evidence.injected, evidence.events)[0])}
    assert len(by_kind) == 4
    kill, stop = by_kind["scorer", "sigkill"], by_kind["scorer", "sigstop"]
    assert (kill.detection_p50_s, kill.recovery_p95_s, kill.moments) == (1.0, 10.0, {"step": 1})
    assert (stop.detection_p50_s, stop.recovery_p50_s) == (3.0, 12.0)
    delay = by_kind["scorer", "delayed_messages"]
    assert (delay.num_injected, delay.num_expected, delay.num_detected) == (1, 0, 0)
    # Without the last recovery.
    (*_, unfinished) = rows(match(evidence.injected, evidence.events[:-1])[0])
    assert (unfinished.num_injected, unfinished.num_detected, unfinished.num_recovered) == (1, 1, 0)
    assert unfinished.recovery_p50_s is None


def test_effective_time_and_bands() -> None:
    steps = good().steps
    assert step_median_s(steps) == 2.0 and evaluation_s(steps) == 0.5
    assert effective_share(steps, 10.0, undisturbed_step_s=2.0) == pytest.approx(8.5 / 10.0)
    assert effective_share(steps, 10.0, undisturbed_step_s=3.0) == 1.0
    assert accuracy_of(steps) == 0.5 and accuracy_of(steps[:3]) is None
    assert measured_band([0.5, 0.6]) == pytest.approx((0.4, 0.7))
    assert measured_band([0.5]) == pytest.approx((0.48, 0.52))


def test_what_was_on_a_lost_host_is_lost_with_it() -> None:
    lost = _fault(HOST, Kind.SIGKILL, Moment.STEP, 10.0)
    events = [_noticed("generator", 11.0, 0), _noticed(HOST, 12.0, 1)]
    come_back = {"event": "recovered", "role": HOST, "number": 1, "time_s": 50.0}
    matches, extra = match([lost], [*events, come_back])
    assert matches[0].detected == events[1] and not extra
    later = _noticed("generator", 60.0, 2)
    assert match([lost], [*events, come_back, later])[1] == [later]
    assert match([lost], [*events, _noticed("scorer", 20.0, 2)])[1]
