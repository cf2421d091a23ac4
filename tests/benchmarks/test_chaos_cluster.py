"""benchmarks/chaos_cluster.py without a cluster: its plans, when it refuses to work, and when it repairs."""

import functools
from pathlib import Path

import pytest
from chaos_cluster import ClusterHosts, ClusterInjector, hosts_in, overrides_of, problem
from chaos_faults import CLUSTER_KINDS, HOST, UNNOTICED, Kind, Moment, Planned, plan
from chaos_report import match

from forgeasync.config import load_config
from tests.benchmarks.made_faults import Watched, detected, injected, planned

REPOSITORY = Path(__file__).parents[2]


def test_a_plan_has_every_kind_of_a_cluster_and_is_the_seeds() -> None:
    def draw(seed: int) -> list[Planned]:
        return plan(seed, 300, [HOST], steps_per_fault=10, kinds_of=CLUSTER_KINDS)

    assert draw(3) == draw(3) != draw(4)
    assert {one.kind for one in draw(3)} == set(CLUSTER_KINDS[HOST])
    assert {one.role for one in draw(3)} == {HOST} and {one.moment for one in draw(3)} == {Moment.STEP}
    without_a_cluster = plan(3, 300, [HOST], steps_per_fault=10)
    assert {one.kind for one in without_a_cluster} == {Kind.SIGKILL}


@pytest.mark.parametrize("kind", CLUSTER_KINDS[HOST])
def test_a_lost_host_is_matched_and_what_has_to_pass_without_notice_is_not(kind: Kind) -> None:
    event = detected(HOST, 121.0)
    (one,), extra = match([injected(HOST, kind, 100.0)], [event])
    assert one.is_expected == (kind not in UNNOTICED)
    assert (one.detected, extra) == ((None, [event]) if kind in UNNOTICED else (event, []))


LISTED = "node2 (id: 1)\nnode10 (id: 4)\nnode1\nnodes\nother (id: 3)\n"


def test_hosts_are_found_in_the_order_of_their_numbers() -> None:
    assert hosts_in(LISTED) == ["node1", "node2", "node10"]
    assert hosts_in("") == []


@pytest.mark.parametrize(
    ("names", "idle", "address", "said"),
    [
        (["node1"], ["node1"], "10.77.0.254", "there are 1, must be 2 or more"),
        (["node1", "node2"], ["node1"], "10.77.0.254", "Slurm does not call node2 idle"),
        (["node1", "node2"], ["node2", "node1"], "127.0.1.1", "is 127.0.1.1, which no host reaches"),
        (["node1", "node2"], ["node2", "node1"], "10.77.0.254", None),
    ],
)
def test_where_no_faults_can_be_injected(
    names: list[str], idle: list[str], address: str, said: str | None
) -> None:
    words = problem(names, idle, address)
    assert words is None if said is None else words is not None and said in words


def test_a_run_is_placed_on_all_hosts_unless_the_command_line_says_otherwise() -> None:
    default = [REPOSITORY / "configs" / "tiny_moe_cpu.yaml"]
    config = load_config(default, overrides_of(3, ["timeouts.host_s=33"]))
    assert config.launcher.kind == "slurm" and config.launcher.hosts.generators == 2
    assert (config.generator.num_replicas, config.timeouts.host_s) == (2, 33.0)


class Recorded(ClusterHosts):
    """Hosts to which nothing is done; the names of calls are recorded."""

    def __init__(self) -> None:
        super().__init__(["node1", "node2", "node3"])
        self.done: list[tuple[str, str]] = []

    def break_host(self, host: str, kind: Kind) -> None:
        self.done.append((kind.value, host))

    def repair(self, host: str) -> None:
        self.done.append(("repair", host))


def test_a_long_partition_heals_once_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_cluster.HOST_LIMIT_S", 0.0)
    fault = planned(HOST, Kind.LONG_PARTITION, which=0.5)
    hosts = Recorded()
    run = Watched(tmp_path, fault, make=functools.partial(ClusterInjector, hosts=hosts))
    assert not run.look() and hosts.done == []
    run.write_steps(1, step_s=0.0)
    (one,) = run.look()
    assert (one.rank, one.words, hosts.done) == (1, "node2", [("long_partition", "node2")])
    run.look(detected(HOST, 1.0))
    assert len(hosts.done) == 1, "a fault of long ago"
    run.look(detected(HOST, 1e12))
    assert hosts.done == [("long_partition", "node2"), ("repair", "node2")]


def test_a_fault_of_a_host_is_undone_once_by_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("chaos_cluster.ask", lambda *command: asked.append(" ".join(command)) or "")
    hosts = ClusterHosts(["node1", "node2"])
    for kind in (Kind.SLOW_LINK, Kind.SHORT_PARTITION):
        hosts.break_host("node2", kind)
        hosts.repair("node2")
    hosts.repair("node2")
    limits = "root tbf rate 4mbit burst 32kb latency 200ms"
    assert asked == [
        f"ip netns exec node2 tc qdisc add dev eth0 {limits}",
        f"tc qdisc add dev veth2 {limits}",
        "ip netns exec node2 tc qdisc del dev eth0 root",
        "tc qdisc del dev veth2 root",
        "ip link set veth2 down",
        "ip link set veth2 up",
    ]
