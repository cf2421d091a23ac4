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
from chaos_faults import HOST, KINDS, MOMENTS, SUPERVISED, Kind, Moment, plan
from chaos_injector import Orders
from chaos_run import may_be_of

from forgeasync.observability import Role
from tests.benchmarks.made_faults import Watched, detected, planned, recovered

ALL_MOMENTS = tuple(Moment)
Process = subprocess.Popen[str]
Start = Callable[..., Process]
Obey = Callable[[str], tuple[Process, Orders]]
Event = Callable[[str, float, int], dict[str, Any]]


def test_a_plan_is_the_seeds_and_spreads_faults_over_the_run() -> None:
    roles = [role for role in KINDS if role != HOST]
    faults = plan(3, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert faults == plan(3, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert faults != plan(4, 3000, roles, steps_per_fault=10, moments=ALL_MOMENTS)
    assert [(one.at_step - 1) // 10 for one in faults] == list(range(3000)), "one in every ten steps"
    assert {(one.role, one.kind) for one in faults} == {(role, one) for role in roles for one in KINDS[role]}
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


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do nothing, or what a command says; they end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, **options: Any) -> Process:
        processes.append(subprocess.Popen(command or ["sleep", "1000"], text=True, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_fault_waits_for_its_step_and_for_the_recovery_of_its_role(tmp_path: Path, start: Start) -> None:
    processes = [start() for _ in range(3)]
    kill = planned("scorer", Kind.SIGKILL, at_step=3, which=0.99)
    run = Watched(tmp_path, planned("scorer", Kind.SIGSTOP, at_step=2), kill)
    run.look()
    run.list_processes(*(("scorer", one.pid) for one in processes))
    run.write("metrics.jsonl", {"step": 0}, {"step": 1, "time/step_s": 1.0})
    assert not run.look(), "its step is not done"
    run.write_steps(2)
    (first,) = run.look()
    assert (first.pid, first.rank, first.kind) == (processes[0].pid, 0, Kind.SIGSTOP)
    _, status = os.waitpid(processes[0].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    run.write_steps(7)
    run.look()
    run.look(detected("scorer", first.time_s + 9))
    assert len(run.look(recovered("scorer", 0.0, 1))) == 1, "the role has not recovered"
    run.look(recovered("scorer", first.time_s + 20))
    assert processes[2].wait() == -signal.SIGKILL
    witnessed = [json.loads(line) for line in (tmp_path / "witness.jsonl").read_text().splitlines()]
    assert witnessed == [dataclasses.asdict(one) for one in run.look()]
    assert [one["pid"] for one in witnessed] == [processes[0].pid, processes[2].pid]


def test_a_disk_fails_again_once_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that is refused in an outage has lines of its own."""
    monkeypatch.setattr(chaos_injector, "OUTAGE_S", 0.0)
    run = Watched(tmp_path, *(planned("storage", Kind.FULL_DISK) for _ in range(3)))
    run.list_processes()
    run.write_steps(1, step_s=0.0)
    (tmp_path / "run.out").write_text("TensorBoard's files cannot be written: their lines come later\n" * 9)

    def num_after(*events: tuple[str, Event, int]) -> int:
        told = (event(role, time.time(), number) for role, event, number in events)
        return len(run.look(*told, num_looks=50))

    assert num_after() == 1 and not run.num_ended_outages, "nothing was refused that has a line"
    assert num_after(("storage", detected, 0), ("storage", detected, 1), ("storage", recovered, 0)) == 1
    assert run.num_ended_outages == 1
    assert num_after(("storage", recovered, 1)) == 2
    assert num_after(("storage", detected, 2), ("storage", detected, 3), ("storage", recovered, 2)) == 2
    lost = ("controller", detected, 4), ("controller", recovered, 4)
    assert num_after(*lost) == 3, "its outage is gone with it"


def test_a_fault_within_an_evaluation_waits_for_one(tmp_path: Path, start: Start) -> None:
    process = start()
    run = Watched(tmp_path, planned("scorer", Kind.SIGKILL, moment=Moment.EVALUATION))
    run.list_processes(("scorer", process.pid), controller=1)
    run.write_steps(3)
    for said in (
        "t evaluating version 0 on 8 problems",
        "t evaluating version 3 on 8 problems\nt step  3/9  reward 1  eval 0.5",
        "t evaluating with 8 responses beside training\nt evaluation begun: held-out accuracy 1",
    ):
        (run.run_dir / "run.log").write_text(f"{said}\nt step  4/9  reward 1\n")
        run.look()
        assert process.poll() is None
    with (run.run_dir / "run.log").open("a") as file:
        file.write("t evaluating with 8 responses beside training\nt step  5/9  reward 1\n")
    (found,) = run.look()
    assert process.wait() == -signal.SIGKILL and found.moment is Moment.EVALUATION


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

    def obey(body: str) -> tuple[Process, Orders]:
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
def test_a_disk_refuses_what_is_below_its_folder(tmp_path: Path, obey: Obey, kind: str, said: str) -> None:
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
    environment = os.environ | orders.environment()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "['MainThread']\n", "processes that fork must have no thread"


def test_files_of_other_runs_are_theirs() -> None:
    own, other = "0a" * 16, "0b" * 16
    for name in ("sem.forgeasync-{}-xyz", "forgeasync-{}-xyz", "forgeasync_payloads-7-0123456789abcdef-{}"):
        assert may_be_of(Path("/dev/shm", name.format(own)), {own})
        assert not may_be_of(Path("/dev/shm", name.format(other)), {own})
    assert may_be_of(Path("/dev/shm/sem.mp-xyz"), {own}) and not may_be_of(Path("/dev/shm/other"), {own})
