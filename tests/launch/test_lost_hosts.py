"""What is said of hosts that are lost, and what the others hear meanwhile; nothing is started."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from forgeasync.config import ProcessLauncher, SlurmLauncher, TimeoutSection
from forgeasync.launch import (
    HostAgent,
    HostLost,
    HostRole,
    JobHost,
    JobHosts,
    gather_host_limits,
    job_hosts,
    lost_words,
)
from forgeasync.testing import HandTime


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


def test_the_host_that_was_silent_first_is_named_first() -> None:
    """A scheduler may end a job that has lost a node, and hosts are missed in any order."""
    assert lost_words(HOSTS, None) == (
        "host trainer-1 (trainer, node2) is lost: its agent cannot be reached; "
        "see logs/host-trainer-1.log; lost after it: trainer-0 (trainer, node1)"
    )


def test_what_has_ended_the_job_comes_before_what_was_seen_of_it() -> None:
    why = "Slurm job 7 was preempted by another job"
    words = lost_words(HOSTS[:1], why)
    assert words.startswith(f"host trainer-0 (trainer, node1) is lost: {why}, and no answer; ")


def test_a_host_that_is_called_as_its_machine_is_named_once() -> None:
    named = [host("node1", "node1", heard_s=0.0, problem="no answer")]
    assert lost_words(named, None).startswith("host node1 (trainer) is lost: no answer")


class Agent:
    """An agent in this process, whose host can be cut off."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.is_cut_off = False
        answers = SimpleNamespace(call_one=self._answer)
        self.beat = self.limits = self.kill = self.remove_folders = self.end_host = answers

    async def _answer(self, *arguments: object) -> int:
        self.num_beats += 1
        if self.is_cut_off:
            await asyncio.Event().wait()
        return 0


def test_hosts_that_are_left_are_called_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody calls ends itself: the trainer would, while it saves the weights."""
    monkeypatch.setattr(job_hosts, "BEAT_S", 0.005)
    clock = HandTime()

    async def scenario() -> None:
        launcher = SlurmLauncher(kind="slurm", gpus_per_host=0, partition="main")
        hosts = JobHosts(launcher, "test", tmp_path, TimeoutSection(host_s=0.2))
        agents = [Agent(), Agent()]
        hosts._hosts = {
            HostRole.TRAINER: [
                dataclasses.replace(one, agent=cast(HostAgent, agent), problem=None)
                for one, agent in zip(HOSTS, agents, strict=False)
            ]
        }
        watching = asyncio.create_task(hosts.watch())
        agents[0].is_cut_off = True
        await clock.pass_until(watching.done, step_s=0.005)
        with pytest.raises(HostLost, match=r"host trainer-0 .* is lost: waiting for an answer took longer"):
            await watching
        num_before = agents[1].num_beats
        await clock.pass_until(lambda: agents[1].num_beats >= num_before + 3, step_s=0.005)
        hosts._is_open = True
        with pytest.raises(HostLost, match="trainer-0"):
            await hosts.close()
        num_before = agents[1].num_beats
        over_s = clock() + 0.05
        await clock.pass_until(lambda: clock() >= over_s, step_s=0.005)
        assert agents[1].num_beats == num_before, "nothing of a run that has ended is called"

    clock.run(scenario())


def test_a_host_that_ends_during_a_call_is_missed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call would only end by its deadline."""
    monkeypatch.setattr(job_hosts, "BEAT_S", 0.005)
    monkeypatch.setattr(job_hosts, "LOOK_S", 0.01)

    async def scenario() -> None:
        launcher = ProcessLauncher(kind="process")
        hosts = JobHosts(launcher, "test", tmp_path, TimeoutSection(host_s=50.0))
        process = await asyncio.create_subprocess_exec("sleep", "600")
        agent = Agent()
        agent.is_cut_off = True
        hosts._hosts = {
            HostRole.TRAINER: [
                dataclasses.replace(HOSTS[2], agent=cast(HostAgent, agent), worker_pid=process.pid)
            ]
        }
        watching = asyncio.create_task(hosts.watch())
        while not agent.num_beats:
            await asyncio.sleep(0.001)
        process.kill()
        await process.wait()
        with pytest.raises(HostLost, match=r"trainer-2 .* is lost: its process has ended"):
            await watching

    asyncio.run(scenario())


def test_nothing_is_asked_of_a_host_that_is_lost_to_end_its_procs() -> None:
    """Its answer would never come, and the run waits for the end of its procs."""

    async def scenario(problem: str | None) -> int:
        agent = Agent()
        one = dataclasses.replace(HOSTS[0], agent=cast(HostAgent, agent), problem=problem)
        await one.kill(7)
        return agent.num_beats

    assert asyncio.run(scenario(None)) == 1
    assert asyncio.run(scenario("no answer")) == 0
