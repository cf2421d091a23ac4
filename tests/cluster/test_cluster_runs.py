"""Runs on a cluster with real daemons: how Slurm and ssh start them, and everything that can end them.

The hosts are namespaces of this machine (``tests.support.cluster``), so neither GPUs nor RDMA are involved.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import tests.support.cluster
from tests.support.app_runs import NEVER_ENDING, read_lines, write_tiny_run
from tests.support.cluster.cluster import PARTITION, Cluster, HeadRun
from tests.support.cluster.machines import ABSENT
from tests.support.warm_python import REAL_PYTHON

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]

STEP_S = 300.0
"""Seconds to the first step on a busy machine."""
END_S = 240.0
"""Most seconds that a run may take to end: its own timeouts are short here."""
REFUSED_S = 120.0

TRANSLATED = Path(tests.support.cluster.__file__).parent
"""First in PATH: squeue as newer releases of Slurm have it."""

TRAINER_HOSTS, GENERATOR_HOSTS = ("node1", "node2"), ("node3",)


@dataclass(slots=True)
class ClusterRuns:
    """Starts apps.grpo on the head."""

    cluster: Cluster
    config_file: Path
    run_dir: Path

    def start(self, launcher: str, *overrides: str, first_in_path: Path | None = TRANSLATED) -> HeadRun:
        quick = ["timeouts.host_s=15", "timeouts.sigterm_s=10", "checkpoint.every_steps=null"]
        return self.cluster.run(
            *(REAL_PYTHON, "-m", "apps.grpo", "--config", str(self.config_file)),
            *(f"launcher={launcher}", f"run_dir={self.run_dir}", "max_off_policy_steps=1"),
            *(NEVER_ENDING, *quick, *overrides),
            first_in_path=first_in_path,
        )

    @property
    def slurm(self) -> str:
        """The trainer's hosts are two nodes of one proc each, since its ranks have to find each other."""
        hosts = {"trainer": len(TRAINER_HOSTS), "generators": len(GENERATOR_HOSTS)}
        return json.dumps(
            {"kind": "slurm", "gpus_per_host": 0, "partition": PARTITION, "python": REAL_PYTHON}
            | {"hosts": hosts}
        )

    @property
    def ssh(self) -> str:
        hosts = {"trainer": TRAINER_HOSTS, "generators": GENERATOR_HOSTS}
        return json.dumps(
            {"kind": "ssh", "gpus_per_host": 0, "python": REAL_PYTHON, "ssh_args": self.cluster.ssh_args}
            | {"hosts": hosts}
        )

    def wait_for(self, until: Callable[[], bool], run: HeadRun) -> None:
        deadline = time.monotonic() + STEP_S
        while not until():
            assert run.process.poll() is None, run.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.3)

    def wait_for_step(self, run: HeadRun) -> None:
        self.wait_for(self.has_stepped, run)
        (_, step, *_) = read_lines(self.run_dir / "metrics.jsonl")
        assert step["payload/num_read_shared"] == 0 < step["payload/num_read_remote"]

    def has_stepped(self) -> bool:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) >= 2


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def runs(cluster: Cluster, config_file: Path, tmp_path: Path) -> ClusterRuns:
    return ClusterRuns(cluster=cluster, config_file=config_file, run_dir=tmp_path / "run")


def last_line(err: str) -> str:
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_run_takes_a_step_and_ctrl_c_leaves_nothing(runs: ClusterRuns, kind: str) -> None:
    run = runs.start(runs.slurm if kind == "slurm" else runs.ssh)
    runs.wait_for_step(run)
    assert len(runs.cluster.jobs()) == (kind == "slurm")
    # Agent and role on every node, and folders in their shared memory.
    assert all(node.left_by_runs() and node.folders_of_runs() for node in runs.cluster.nodes.values())
    run.interrupt()
    code, err = run.finish(END_S)
    assert (code, "interrupted by SIGINT" in last_line(err)) == (130, True), err
    runs.cluster.wait_until_clean()
    assert not runs.cluster.folders()


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_killed_host_ends_the_run_and_is_named(runs: ClusterRuns, kind: str) -> None:
    """The other host of its role ends too, which Monarch cannot reach any more as a part of its mesh."""
    run = runs.start(runs.slurm if kind == "slurm" else runs.ssh)
    runs.wait_for_step(run)
    runs.cluster.nodes[TRAINER_HOSTS[1]].kill()
    code, err = run.finish(END_S)
    assert code == 1, err
    name = "trainer-1 (trainer, node2)" if kind == "slurm" else "node2 (trainer)"
    assert f"HostLost: host {name} is lost" in last_line(err), err
    runs.cluster.wait_until_clean()
    assert not runs.cluster.folders()


def test_a_job_that_someone_cancels_is_told_as_that(runs: ClusterRuns) -> None:
    run = runs.start(runs.slurm)
    runs.wait_for_step(run)
    (job,) = runs.cluster.jobs()
    runs.cluster.cancel(job)
    code, err = run.finish(END_S)
    assert code == 1, err
    assert f"Slurm job {job} was cancelled by someone other than this run" in last_line(err), err
    runs.cluster.wait_until_clean()


@pytest.mark.parametrize("why", ["a drained node", "more nodes than there are"])
def test_a_queue_that_never_grants_ends_with_its_reason(runs: ClusterRuns, why: str) -> None:
    num_nodes, more = 3, []
    if why == "a drained node":
        runs.cluster.scontrol("update", "NodeName=node3", "State=DRAIN", "Reason=test")
    else:
        # Slurm takes such a job, unless EnforcePartLimits is set.
        num_nodes, more = 9, ["launcher.hosts.generators=7", "generator.num_replicas=7"]
    run = runs.start(runs.slurm, "launcher.start_timeout_s=8", *more)
    code, err = run.finish(REFUSED_S)
    assert code == 1, err
    words = last_line(err)
    assert "has not started within 8 s (launcher.start_timeout_s): it is PENDING (" in words, err
    assert f"{num_nodes} nodes of partition main" in words, err
    runs.cluster.wait_until_clean()


@pytest.mark.parametrize("end", ["ctrl-c", "scancel"])
def test_a_run_that_waits_in_the_queue_can_be_ended(runs: ClusterRuns, end: str) -> None:
    runs.cluster.scontrol("update", "NodeName=node3", "State=DRAIN", "Reason=test")
    run = runs.start(runs.slurm)
    runs.wait_for(lambda: len(runs.cluster.jobs()) == 1, run)
    (job,) = runs.cluster.jobs()
    if end == "ctrl-c":
        run.interrupt()
    else:
        runs.cluster.cancel(job)
    code, err = run.finish(REFUSED_S)
    if end == "ctrl-c":
        assert code == 130, err
    else:
        assert code == 1, err
        assert f"Slurm job {job} was cancelled by someone other than this run" in last_line(err), err
    runs.cluster.wait_until_clean()


def test_a_job_that_fails_while_its_hosts_start_ends_the_run(runs: ClusterRuns) -> None:
    run = runs.start(runs.slurm, "launcher.python=/nowhere/python")
    code, err = run.finish(REFUSED_S)
    assert code == 1, err
    assert "Slurm job" in last_line(err) and "has failed before all hosts had started" in last_line(err), err
    runs.cluster.wait_until_clean()


@pytest.mark.parametrize("name", [ABSENT, "nowhere"])
def test_an_ssh_that_fails_is_named(runs: ClusterRuns, name: str) -> None:
    """One host is known and does not answer, the other is not known."""
    run = runs.start(runs.ssh, f"launcher.hosts.generators=[{name}]")
    code, err = run.finish(REFUSED_S)
    assert code == 1, err
    assert "LaunchFailed: " in last_line(err) and name in last_line(err), err
    if name == ABSENT:
        assert f"ssh to {name} has ended before all hosts had started" in last_line(err), err
    runs.cluster.wait_until_clean()


def test_the_installed_slurm_is_refused_if_it_is_too_old(runs: ClusterRuns) -> None:
    if runs.cluster.slurm_release() >= (24, 5):
        pytest.skip("the installed Slurm is new enough")
    run = runs.start(runs.slurm, first_in_path=None)
    code, err = run.finish(REFUSED_S)
    assert code == 2, err
    assert "Monarch reads v0.0.41 and later" in err, err
    assert not runs.cluster.left() and not runs.run_dir.exists()


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_head_that_no_host_could_reach_is_refused(runs: ClusterRuns, kind: str) -> None:
    with runs.cluster.head_name_is("127.0.1.1"):
        run = runs.start(runs.slurm if kind == "slurm" else runs.ssh)
        code, err = run.finish(REFUSED_S)
    assert code == 2, err
    assert "'head' has 127.0.1.1 only" in err, err
    assert not runs.cluster.left() and not runs.run_dir.exists()
