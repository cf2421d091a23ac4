"""Runs on a cluster with real daemons: how Slurm and ssh start them, and everything that can end them.

The hosts are namespaces of this machine (``tests.support.cluster``), so neither GPUs nor RDMA are involved.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tests.support.cluster
from tests.support.app_runs import NEVER_ENDING, read_lines, write_tiny_run
from tests.support.cluster.cluster import PACKAGES, PARTITION, Cluster, HeadRun, cluster_here, why_not
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
CANCELLED = "was cancelled by someone other than this run"


@dataclass(slots=True)
class ClusterRuns:
    """Starts apps.grpo on the head."""

    cluster: Cluster
    config_file: Path
    run_dir: Path

    def start(self, kind: str, *overrides: str, first_in_path: Path | None = TRANSLATED) -> HeadRun:
        quick = ["timeouts.host_s=15", "timeouts.sigterm_s=10", "checkpoint.every_steps=null"]
        launcher = {"kind": kind, "gpus_per_host": 0, "python": REAL_PYTHON} | self._launchers()[kind]
        return self.cluster.run(
            *(REAL_PYTHON, "-m", "apps.grpo", "--config", str(self.config_file)),
            *(f"launcher={json.dumps(launcher)}", f"run_dir={self.run_dir}", "max_off_policy_steps=1"),
            *(NEVER_ENDING, *quick, *overrides),
            first_in_path=first_in_path,
        )

    def _launchers(self) -> dict[str, dict[str, object]]:
        """The trainer's hosts are two nodes of one proc each, since its ranks have to find each other."""
        names = {"trainer": TRAINER_HOSTS, "generators": GENERATOR_HOSTS}
        counts = {role: len(hosts) for role, hosts in names.items()}
        return {
            "slurm": {"partition": PARTITION, "hosts": counts},
            "ssh": {"ssh_args": self.cluster.ssh_args, "hosts": names},
        }

    def ends(self, run: HeadRun, code: int, words: str, *, within_s: float = REFUSED_S) -> None:
        """Wait for the end of a run, whose last line has these words. Nothing of it is left."""
        found, err = run.finish(within_s)
        assert found == code and words in err.strip().rpartition("\n")[2], err
        self.cluster.wait_until_clean()

    def refused(self, run: HeadRun, words: str) -> None:
        """A run that ends before it makes anything."""
        code, err = run.finish(REFUSED_S)
        assert code == 2 and words in err, err
        assert not self.cluster.left() and not self.run_dir.exists()

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
def shared_cluster() -> Iterator[Cluster]:
    """One cluster for all tests, where this machine can have one."""
    if (why := why_not()) is not None:
        pytest.skip(f"a cluster of namespaces cannot be started here: {why} (Debian: {PACKAGES})")
    with cluster_here() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all nodes and nothing on them; whatever a test leaves is ended after it."""
    yield shared_cluster
    shared_cluster.make_ready()


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def runs(cluster: Cluster, config_file: Path, tmp_path: Path) -> ClusterRuns:
    return ClusterRuns(cluster=cluster, config_file=config_file, run_dir=tmp_path / "run")


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_run_takes_a_step_and_ctrl_c_leaves_nothing(runs: ClusterRuns, kind: str) -> None:
    run = runs.start(kind)
    runs.wait_for_step(run)
    assert len(runs.cluster.jobs()) == (kind == "slurm")
    # Agent and role on every node, and folders in their shared memory.
    assert all(node.left_by_runs() and node.folders_of_runs() for node in runs.cluster.nodes.values())
    run.interrupt()
    runs.ends(run, 130, "interrupted by SIGINT", within_s=END_S)
    assert not runs.cluster.folders()


@pytest.mark.parametrize(
    ("kind", "name"), [("slurm", "trainer-1 (trainer, node2)"), ("ssh", "node2 (trainer)")]
)
def test_a_killed_host_ends_the_run_and_is_named(runs: ClusterRuns, kind: str, name: str) -> None:
    """The other host of its role ends too, which Monarch cannot reach any more as a part of its mesh."""
    run = runs.start(kind)
    runs.wait_for_step(run)
    runs.cluster.nodes[TRAINER_HOSTS[1]].kill()
    runs.ends(run, 1, f"HostLost: host {name} is lost", within_s=END_S)
    assert not runs.cluster.folders()


def test_a_job_that_someone_cancels_is_told_as_that(runs: ClusterRuns) -> None:
    run = runs.start("slurm")
    runs.wait_for_step(run)
    (job,) = runs.cluster.jobs()
    runs.cluster.cancel(job)
    runs.ends(run, 1, f"Slurm job {job} {CANCELLED}", within_s=END_S)


@pytest.mark.parametrize("why", ["a drained node", "more nodes than there are"])
def test_a_queue_that_never_grants_ends_with_its_reason(runs: ClusterRuns, why: str) -> None:
    num_nodes, more = 3, []
    if why == "a drained node":
        runs.cluster.scontrol("update", "NodeName=node3", "State=DRAIN", "Reason=test")
    else:
        # Slurm takes such a job, unless EnforcePartLimits is set.
        num_nodes, more = 9, ["launcher.hosts.generators=7", "generator.num_replicas=7"]
    run = runs.start("slurm", "launcher.start_timeout_s=8", *more)
    code, err = run.finish(REFUSED_S)
    assert code == 1, err
    words = err.strip().splitlines()[-1]
    assert "has not started within 8 s (launcher.start_timeout_s): it is PENDING (" in words, err
    assert f"{num_nodes} nodes of partition main" in words, err
    runs.cluster.wait_until_clean()


@pytest.mark.parametrize("end", ["ctrl-c", "scancel"])
def test_a_run_that_waits_in_the_queue_can_be_ended(runs: ClusterRuns, end: str) -> None:
    runs.cluster.scontrol("update", "NodeName=node3", "State=DRAIN", "Reason=test")
    run = runs.start("slurm")
    runs.wait_for(lambda: len(runs.cluster.jobs()) == 1, run)
    (job,) = runs.cluster.jobs()
    if end == "ctrl-c":
        run.interrupt()
        runs.ends(run, 130, "")
    else:
        runs.cluster.cancel(job)
        runs.ends(run, 1, f"Slurm job {job} {CANCELLED}")


def test_a_job_that_fails_while_its_hosts_start_ends_the_run(runs: ClusterRuns) -> None:
    run = runs.start("slurm", "launcher.python=/nowhere/python")
    runs.ends(run, 1, "has failed before all hosts had started")


@pytest.mark.parametrize(
    ("name", "words"),
    [(ABSENT, f"ssh to {ABSENT} has ended before all hosts had started"), ("nowhere", "nowhere")],
    ids=["does_not_answer", "is_not_known"],
)
def test_an_ssh_that_fails_is_named(runs: ClusterRuns, name: str, words: str) -> None:
    run = runs.start("ssh", f"launcher.hosts.generators=[{name}]")
    runs.ends(run, 1, words)


def test_the_installed_slurm_is_refused_if_it_is_too_old(runs: ClusterRuns) -> None:
    if runs.cluster.slurm_release() >= (24, 5):
        pytest.skip("the installed Slurm is new enough")
    run = runs.start("slurm", first_in_path=None)
    runs.refused(run, "Monarch reads v0.0.41 and later")


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_head_that_no_host_could_reach_is_refused(runs: ClusterRuns, kind: str) -> None:
    with runs.cluster.head_name_is("127.0.1.1"):
        runs.refused(runs.start(kind), "'head' has 127.0.1.1 only")
