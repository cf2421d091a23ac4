"""What is said of hosts that are lost; nothing is started."""

import dataclasses
from pathlib import Path
from typing import cast

from forgeasync.launch.agent import HostAgent
from forgeasync.launch.host_limits import gather_host_limits
from forgeasync.launch.job_hosts import JobHost, lost_words
from forgeasync.launch.jobs import HostRole


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
