"""benchmarks/chaos.py: its plans of faults, and when and how it injects them."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos_injector
import pytest
from chaos_faults import HOST, KINDS, MOMENTS, SUPERVISED, Kind, Moment, Planned, plan
from chaos_injector import Injector, Orders
from chaos_run import may_be_of

from forgeasync.observability import Role

ALL_MOMENTS = tuple(Moment)
Start = Callable[..., "subprocess.Popen[str]"]
Obey = Callable[[str], tuple["subprocess.Popen[str]", Orders]]


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


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def inject(run_dir: Path, *faults: Planned) -> Injector:
    return Injector(run_dir.parent, faults, max_steps=100)


def write_procs(folder: Path, *roles: tuple[str, int], controller: int | None = None) -> None:
    """Processes of a run: the role of each, whose ranks are counted, and its pid."""
    procs = [
        {"role": role, "rank": [one for one, _ in roles[:index]].count(role), "pid": pid}
        for index, (role, pid) in enumerate(roles)
    ]
    (folder / "procs.json").write_text(json.dumps({"controller": controller or os.getpid(), "procs": procs}))


def ended_orders(folder: Path) -> list[Path]:
    """Orders of outages that are over."""
    return list((folder.parent / "orders").glob("*.end"))


def look(injector: Injector) -> None:
    for _ in range(5):
        injector.look()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do nothing, or what a command says; they end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, **options: Any) -> "subprocess.Popen[str]":
        processes.append(subprocess.Popen(command or ["sleep", "1000"], text=True, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_fault_waits_for_its_step_and_for_the_recovery_of_its_role(run_dir: Path, start: Start) -> None:
    metrics, events = run_dir / "metrics.jsonl", run_dir / "faults.jsonl"
    processes = [start() for _ in range(3)]
    injector = inject(
        run_dir,
        planned("scorer", Kind.SIGSTOP, at_step=2),
        planned("scorer", Kind.SIGKILL, at_step=3, which=0.99),
    )
    look(injector)
    write_procs(run_dir, *(("scorer", one.pid) for one in processes))
    write_lines(metrics, {"step": 0}, {"step": 1, "time/step_s": 1.0})
    look(injector)
    assert not injector.injected, "its step is not done"
    write_lines(metrics, {"step": 2, "time/step_s": 1.0})
    look(injector)
    (first,) = injector.injected
    assert (first.pid, first.rank, first.kind) == (processes[0].pid, 0, Kind.SIGSTOP)
    _, status = os.waitpid(processes[0].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    write_lines(metrics, {"step": 7, "time/step_s": 1.0})
    look(injector)
    noticed = {"event": "detected", "role": "scorer", "number": 0, "time_s": first.time_s + 9}
    write_lines(events, noticed)
    look(injector)
    write_lines(events, noticed, {"event": "recovered", "role": "scorer", "number": 1, "time_s": 0.0})
    look(injector)
    assert len(injector.injected) == 1, "the role has not recovered"
    recovered = {"event": "recovered", "role": "scorer", "number": 0, "time_s": first.time_s + 20}
    write_lines(events, noticed, recovered)
    look(injector)
    assert processes[2].wait() == -signal.SIGKILL
    look(injector)
    witnessed = [json.loads(line) for line in (run_dir.parent / "witness.jsonl").read_text().splitlines()]
    assert witnessed == [dataclasses.asdict(one) for one in injector.injected]
    assert [one["pid"] for one in witnessed] == [processes[0].pid, processes[2].pid]


def test_a_step_that_waited_for_a_role_says_nothing_of_the_next_ones_time(
    run_dir: Path, start: Start
) -> None:
    process = start()
    injector = inject(run_dir, planned("scorer", Kind.SIGKILL, at_step=3, pause_share=0.5))
    write_procs(run_dir, ("scorer", process.pid))
    times_s = {1: 0.0, 2: 0.0, 3: 10_000.0}
    steps = [{"step": step, "time/step_s": time_s} for step, time_s in times_s.items()]
    write_lines(run_dir / "metrics.jsonl", *steps)
    look(injector)
    assert [one.pid for one in injector.injected] == [process.pid], "the run would be over first"


def test_another_roles_fault_follows_once_the_one_before_was_detected(run_dir: Path, start: Start) -> None:
    processes = [start() for _ in range(3)]
    roles = ("generator", "scorer", "controller")
    injector = inject(run_dir, *(planned(role, Kind.SIGKILL, at_step=1) for role in roles))
    listed = [(role, one.pid) for role, one in zip(roles, processes, strict=True)]
    write_procs(run_dir, *listed[:2], controller=processes[2].pid)
    write_lines(run_dir / "metrics.jsonl", {"step": 1, "time/step_s": 1.0})
    events: list[dict[str, Any]] = []

    def injected() -> list[str]:
        write_lines(run_dir / "faults.jsonl", *events)
        look(injector)
        return [one.role for one in injector.injected]

    assert injected() == ["generator"]
    events.append({"event": "detected", "role": "generator", "number": 0, "time_s": 1e12})
    assert injected() == ["generator", "scorer"], "another role need not wait for the recovery"
    events.append({"event": "detected", "role": "scorer", "number": 1, "time_s": 1e12})
    assert injected() == ["generator", "scorer", "controller"]


def test_a_disk_fails_again_once_every_file_was_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that is refused in an outage has lines of its own."""
    monkeypatch.setattr(chaos_injector, "OUTAGE_S", 0.0)
    injector = inject(run_dir, *(planned("storage", Kind.FULL_DISK, at_step=1) for _ in range(3)))
    write_procs(run_dir)
    write_lines(run_dir / "metrics.jsonl", {"step": 1, "time/step_s": 0.01})
    run_dir.with_suffix(".out").write_text(
        "TensorBoard's files cannot be written: their lines come later\n" * 9
    )
    events: list[dict[str, Any]] = []

    def num_after(*more: tuple[str, int], role: str = "storage") -> int:
        for event, number in more:
            events.append({"event": event, "role": role, "number": number, "time_s": time.time()})
        write_lines(run_dir / "faults.jsonl", *events)
        for _ in range(50):
            injector.look()
            time.sleep(0.002)
        return len(injector.injected)

    assert num_after() == 1 and not ended_orders(run_dir), "nothing was refused that has a line"
    assert num_after(("detected", 0), ("detected", 1), ("recovered", 0)) == 1
    assert len(ended_orders(run_dir)) == 1
    assert num_after(("recovered", 1)) == 2
    assert num_after(("detected", 2), ("detected", 3), ("recovered", 2)) == 2
    events.append({"event": "detected", "role": "controller", "number": 4, "time_s": time.time()})
    assert num_after(("recovered", 4), role="controller") == 3, "its outage is gone with it"


def test_a_disk_that_fails_while_something_still_waits_for_it_has_room_again_without_further_news(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is found refused between the look for quiet and the outage is news of it."""
    monkeypatch.setattr(chaos_injector, "OUTAGE_S", 0.0)
    fault = planned("storage", Kind.FULL_DISK, at_step=1, pause_share=1.0)
    injector = inject(run_dir, fault)
    monkeypatch.setattr(injector, "_pause", lambda seconds: iter([None]))
    write_procs(run_dir)
    write_lines(run_dir / "metrics.jsonl", {"step": 1, "time/step_s": 1.0})
    injector.look()
    assert not injector.injected, "it waits within the step"
    waiting = {"event": "detected", "role": "storage", "number": 0, "time_s": time.time()}
    write_lines(run_dir / "faults.jsonl", waiting)
    look(injector)
    assert len(injector.injected) == 1 == len(ended_orders(run_dir))


def test_a_fault_within_an_evaluation_waits_for_one(run_dir: Path, start: Start) -> None:
    process = start()
    injector = inject(run_dir, planned("scorer", Kind.SIGKILL, at_step=1, moment=Moment.EVALUATION))
    write_procs(run_dir, ("scorer", process.pid), controller=1)
    write_lines(run_dir / "metrics.jsonl", {"step": 3, "time/step_s": 1.0})
    for said in (
        "t evaluating version 0 on 8 problems",
        "t evaluating version 3 on 8 problems\nt step  3/9  reward 1  eval 0.5",
        "t evaluating with 8 responses beside training\nt evaluation begun: held-out accuracy 1",
    ):
        (run_dir / "run.log").write_text(f"{said}\nt step  4/9  reward 1\n")
        look(injector)
        assert process.poll() is None
    with (run_dir / "run.log").open("a") as file:
        file.write("t evaluating with 8 responses beside training\nt step  5/9  reward 1\n")
    look(injector)
    assert process.wait() == -signal.SIGKILL
    assert injector.injected[0].moment is Moment.EVALUATION


OBEDIENT = """
import sys, time
sys.orig_argv = ["python", "-m", "apps.grpo"]
import sitecustomize
sitecustomize._start()
{body}
"""


@pytest.fixture
def obey(tmp_path: Path, start: Start) -> Obey:
    """Starts a process that takes orders, as if it were one of a run."""

    def obey(body: str) -> tuple["subprocess.Popen[str]", Orders]:
        orders = Orders(tmp_path / "orders")
        environment = os.environ | orders.environment()
        code = OBEDIENT.format(body=body)
        return start(sys.executable, "-c", code, env=environment, stdout=subprocess.PIPE), orders

    return obey


def test_a_process_ends_itself_when_ordered_to(obey: Obey) -> None:
    process, orders = obey("time.sleep(1000)")
    order = orders.give(process.pid, "exit")
    assert process.wait() == 13
    taken = order.taken()
    assert taken is not None and taken["time_s"] > 0


@pytest.mark.parametrize(("kind", "said"), [("full_disk", "28"), ("failing_disk", "5")])
def test_a_disk_refuses_what_is_below_its_folder_until_the_order_is_ended(
    tmp_path: Path, obey: Obey, kind: str, said: str
) -> None:
    body = f"""
from pathlib import Path
from forgeasync.files import AppendedFile
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
    process, orders = obey(body)
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


def test_orders_are_for_processes_of_roles_only(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    code = "import threading; print([one.name for one in threading.enumerate()])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | orders.environment(), capture_output=True, text=True
    )
    assert done.stdout == "['MainThread']\n", "processes that fork must have no thread"


def test_files_of_other_runs_are_theirs() -> None:
    own, other = "0a" * 16, "0b" * 16
    for name in ("sem.forgeasync-{}-xyz", "forgeasync-{}-xyz", "forgeasync_payloads-7-0123456789abcdef-{}"):
        assert may_be_of(Path("/dev/shm", name.format(own)), {own})
        assert not may_be_of(Path("/dev/shm", name.format(other)), {own})
    assert may_be_of(Path("/dev/shm/sem.mp-xyz"), {own}) and not may_be_of(Path("/dev/shm/other"), {own})
