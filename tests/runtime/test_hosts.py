"""Hosts on one machine: the GPUs of each process, lost hosts, and the ends of processes."""

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.config import get_global_config

from forgeasync.config import (
    ProcessLauncher,
    ProcessRewardModel,
    SlurmLauncher,
    TimeoutSection,
    check_gpus,
    num_gpus_needed,
    places_of,
)
from forgeasync.controller import places_of_rewards
from forgeasync.runtime import (
    GpuAllocator,
    HostAgent,
    HostLost,
    HostRole,
    JobHost,
    JobHosts,
    LocalHosts,
    build_hosts,
    describe_lost_hosts,
    gather_host_limits,
    job_hosts,
    spawn_role,
    visible_devices,
)
from forgeasync.schema import ConfigError
from forgeasync.testing import HandTime, tiny_config
from tests.support.app_runs import REPOSITORY
from tests.support.processes import free_port, run_alone, wait_until_gone
from tests.support.warm_python import REAL_PYTHON


@pytest.mark.parametrize(
    ("places", "inherited", "seen"),
    [
        ("", None, ""),
        ("", "4,5", ""),
        ("0,1", None, "0,1"),
        ("1", "4,5", "5"),
        ("0,2", " 7 ,GPU-5d12, MIG-9 ,3", "7,MIG-9"),
        ("1", "2,0,-1,1", "0"),
        # A GPU that the job does not have is refused.
        ("0,1", "4", 1),
        ("0,1", "", 0),
        ("0,1", "3,-1,5", 1),
        ("0,1", "-1", 0),
    ],
)
def test_places_count_among_the_gpus_of_the_job(places: str, inherited: str | None, seen: str | int) -> None:
    if isinstance(seen, str):
        assert visible_devices(places, inherited) == seen
        return
    with pytest.raises(ValueError, match=rf"CUDA_VISIBLE_DEVICES={inherited} .* see {seen} GPUs.*number 1"):
        visible_devices(places, inherited)


def test_gpus_are_handed_out_once_and_reserved_ones_never() -> None:
    allocator = GpuAllocator(4, reserved={1, 7})
    assert [allocator.take(2, role="a"), allocator.take(1, role="b")] == [[0, 2], [3]]
    with pytest.raises(ValueError, match="c needs 1 GPUs, but 0 of this host's 4 are left"):
        allocator.take(1, role="c")
    assert GpuAllocator(0, reserved={1}).take(2, role="a") == [], "CPU processes"


def test_roles_of_a_run_that_shares_gpus_get_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of three, of which the run reserves the first."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    machine = LocalHosts(reserved_gpus=[0], share_gpu=True)
    machine.allot(HostRole.TRAINER, 2, gpus_per_proc=1)
    machine.allot(HostRole.GENERATORS, 1, gpus_per_proc=1)
    machine.allot_more(HostRole.GENERATORS, gpus_per_proc=1)
    with pytest.raises(ValueError, match="0 of this host's 3 are left"):
        machine.allot_more(HostRole.GENERATORS, gpus_per_proc=1)


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [([7, 2], None, {2, 7}), ([7, 2], "4, 7,6,2,", {1, 3}), ([7], "4,5", set()), ([], "GPU-5d12", set())],
)
def test_gpus_of_rewards_are_found_among_those_of_the_run(
    gpus: list[int], visible: str | None, expected: set[int]
) -> None:
    assert places_of(gpus, visible) == expected
    with pytest.raises(ValueError, match="must name GPUs by number"):
        places_of([7], "GPU-5d12,7")


def test_a_local_run_keeps_the_gpus_of_its_process_reward_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of four, of which the first is the reward's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = tiny_config(Path("x"))
    reward = ProcessRewardModel(kind="process_reward_model", model_path="prm", gpu=4)
    config = config.model_copy(update={"data": config.data.model_copy(update={"reward": reward})})
    assert places_of_rewards(config, 4) == {0}
    hosts = build_hosts(config, Path("x"))
    hosts.allot(HostRole.GENERATORS, 3, gpus_per_proc=1)
    with pytest.raises(ValueError, match="0 of this host's 4 are left"):
        hosts.allot(HostRole.TRAINER, 1, gpus_per_proc=1)
    for num_missing in (0, 1):
        num_gpus = num_gpus_needed(config) + 1 - num_missing
        found = [str(one) for one in check_gpus(config, num_gpus, num_of_rewards=1)]
        assert len([one for one in found if "less 1 of process reward models" in one]) == num_missing
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    with pytest.raises(ConfigError, match="must be below 4, the GPUs of this machine"):
        places_of_rewards(config, 4)


class Seen(Actor):
    @concurrent_endpoint
    async def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.processes
async def test_procs_of_a_job_with_some_of_a_hosts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5d12,6")
    mesh = spawn_role(this_host(), "seen", num_procs=2, gpus_per_proc=[[2], [0, 1]])
    answers = await mesh.spawn("seen", Seen).devices.call()
    await mesh.stop()
    assert ([seen for _, seen in answers.items()]) == ["6", "4,GPU-5d12"]


CONTROLLER = """
import os, sys
from monarch.actor import Actor, endpoint, this_host
from forgeasync.runtime import spawn_role

class Asked(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

processes = spawn_role(this_host(), "trainer", num_procs=1)
print(processes.spawn("asked", Asked).pid.call_one().get(), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_proc_is_a_program_and_ends_with_the_process_that_has_started_it() -> None:
    pipe = subprocess.PIPE
    controller = subprocess.Popen(
        [REAL_PYTHON, "-c", CONTROLLER], stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY
    )
    try:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        proc = psutil.Process(pid)
        assert proc.cmdline() == [REAL_PYTHON, "-m", "forgeasync.runtime.bootstrap_main"]
        assert proc.ppid() == controller.pid
    finally:
        controller.kill()
        controller.wait()
    try:
        wait_until_gone(pid)
    finally:
        with suppress(psutil.NoSuchProcess):
            proc.kill()


WORKER = """
import os, signal, time
from pathlib import Path
# A pod starts with this handler. Under a shell's background job SIGINT would stay ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from monarch.actor import run_worker_loop_forever
from forgeasync.runtime import job_hosts
if os.fork() == 0:
    # 0A: a socket that listens (tcp_states.h). It is the worker's, as nobody else takes this port.
    while not any(
        fields[1].endswith(":PORT") and fields[3] == "0A"
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    ):
        time.sleep(0.01)
    assert os.getppid() == 1
    job_hosts._end_host()
    time.sleep(60.0)
    print("still here", flush=True)
    os._exit(0)
print("waits for the controller", flush=True)
run_worker_loop_forever(address="tcp://127.0.0.1:NUMBER", ca="trust_all_connections")
"""


def can_make_pid_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.processes
@pytest.mark.skipif(not can_make_pid_namespaces(), reason="this machine makes no namespaces of processes")
def test_a_worker_that_is_process_one_is_ended() -> None:
    port = free_port()
    worker = WORKER.replace("PORT", f"{port:04X}").replace("NUMBER", str(port))
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", worker]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr, ended.stderr
    assert "waits for the controller" in ended.stdout and "still here" not in ended.stdout


def host(name: str, machine: str, *, heard_s: float, problem: str | None) -> JobHost:
    return JobHost(
        id=name,
        role=HostRole.TRAINER,
        agent=cast(HostAgent, None),
        log_file=Path(f"logs/host-{name}.log"),
        limits=dataclasses.replace(gather_host_limits(), machine=machine),
        heard_s=heard_s,
        problem=problem,
    )


HOSTS = [
    host("trainer-0", "node1", heard_s=11.0, problem="no answer"),
    host("trainer-1", "node2", heard_s=10.0, problem="its agent cannot be reached"),
    host("trainer-2", "node3", heard_s=5.0, problem=None),
]


def test_lost_hosts_are_described() -> None:
    # The host that was silent first comes first: a scheduler may end a job that has lost a node.
    assert describe_lost_hosts(HOSTS, None) == (
        "host trainer-1 (trainer, node2) is lost: its agent cannot be reached; see logs/host-trainer-1.log; "
        "lost after it: trainer-0 (trainer, node1)"
    )
    words = describe_lost_hosts(HOSTS[:1], "Slurm job 7 was preempted")
    assert "is lost: Slurm job 7 was preempted, and no answer" in words
    named_after_machine = host("node1", "node1", heard_s=0.0, problem="no answer")
    assert "host node1 (trainer) is lost" in describe_lost_hosts([named_after_machine], None)


class Agent:
    """An agent in this process, whose host can be cut off."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.is_cut_off = False
        answers = SimpleNamespace(call_one=self._answer)
        self.beat = self.limits = self.on_host = self.remove_folders = self.end_host = answers

    async def _answer(self, *arguments: object) -> int:
        self.num_beats += 1
        if self.is_cut_off:
            await asyncio.Event().wait()
        return 0


def job_hosts_of(
    folder: Path, *found: JobHost, launcher: ProcessLauncher | SlurmLauncher, host_s: float
) -> JobHosts:
    hosts = JobHosts(launcher, "test", folder, TimeoutSection(host_s=host_s))
    hosts._hosts = {HostRole.TRAINER: list(found)}
    return hosts


def with_agent(one: JobHost, agent: Agent, problem: str | None = None, **fields: Any) -> JobHost:
    return dataclasses.replace(one, agent=cast(HostAgent, agent), problem=problem, **fields)


async def test_hosts_that_are_left_are_called_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hand_time: HandTime
) -> None:
    """One that nobody calls ends itself: the trainer would, while it saves the weights."""
    monkeypatch.setattr(job_hosts, "BEAT_S", 0.005)
    agents = [Agent(), Agent()]
    launcher = SlurmLauncher(kind="slurm", gpus_per_host=0, partition="main")
    hosts = job_hosts_of(tmp_path, *map(with_agent, HOSTS, agents), launcher=launcher, host_s=0.2)
    watching = asyncio.create_task(hosts.watch())
    agents[0].is_cut_off = True
    await hand_time.pass_until(watching.done, step_s=0.005)
    with pytest.raises(HostLost, match=r"host trainer-0 .* is lost: waiting for an answer took longer"):
        await watching
    num_before = agents[1].num_beats
    await hand_time.pass_until(lambda: agents[1].num_beats >= num_before + 3, step_s=0.005)
    hosts._is_open = True
    with pytest.raises(HostLost, match="trainer-0"):
        await hosts.close()
    num_before = agents[1].num_beats
    over_s = hand_time() + 0.05
    await hand_time.pass_until(lambda: hand_time() >= over_s, step_s=0.005)
    assert agents[1].num_beats == num_before, "nothing of a run that has ended is called"


async def test_a_host_that_ends_during_a_call_is_missed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call would only end by its deadline."""
    monkeypatch.setattr(job_hosts, "BEAT_S", 0.005)
    monkeypatch.setattr(job_hosts, "LOOK_S", 0.01)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    agent = Agent()
    agent.is_cut_off = True
    found = with_agent(HOSTS[2], agent, worker_pid=process.pid)
    hosts = job_hosts_of(tmp_path, found, launcher=ProcessLauncher(kind="process"), host_s=50.0)
    watching = asyncio.create_task(hosts.watch())
    while not agent.num_beats:
        await asyncio.sleep(0.001)
    process.kill()
    await process.wait()
    with pytest.raises(HostLost, match=r"trainer-2 .* is lost: its process has ended"):
        await watching


@pytest.mark.processes
async def test_a_host_of_a_job_acts_through_its_agent(tmp_path: Path) -> None:
    mesh = spawn_role(this_host(), "agent", num_procs=1)
    agent = mesh.spawn("agent", HostAgent, tmp_path / "agent.log", 600.0)
    far = JobHost(id="far", role=HostRole.TRAINER, agent=agent, log_file=tmp_path / "agent.log")
    folder = await far.make_folder(1000)
    (folder / "file").touch()
    await far.remove_files([str(folder / "file")])
    assert list(folder.iterdir()) == []
    assert await far.is_running(os.getpid())
    with pytest.raises(ValueError, match=r"^host far: "):
        await far.make_folder(2**60)
    await agent.remove_folders.call_one()
    await mesh.stop()
    assert not folder.exists()


async def test_nothing_is_asked_of_a_host_that_is_lost_to_end_its_procs() -> None:
    """Its answer would never come, and the run waits for the end of its processes."""
    agent = Agent()
    await with_agent(HOSTS[0], agent, "no answer").kill(7)
    assert agent.num_beats == 0
    await with_agent(HOSTS[0], agent).kill(7)
    assert agent.num_beats == 1


def _limits() -> dict[str, str]:
    """Of a process that imports Monarch first, as this module does."""
    return {name: str(value) for name, value in get_global_config().items()}


def test_a_run_gives_processes_up_and_monarch_does_not() -> None:
    """By its own limits Monarch 0.7 ends a controller half a minute after the death of a worker, and the
    agents of hosts before these can end their hosts.
    """
    limits = run_alone(_limits)
    assert "month" in limits["message_delivery_timeout"] and "month" in limits["channel_reconnect_timeout"]
    assert limits["mesh_orphan_timeout"] == "1day"
