"""The simulator has no rules of its own: breaking a real one changes the run, and none is written twice."""

from collections.abc import Callable
from typing import Any

import pytest

from forgeasync.buffer import LoadController, ReplayBuffer
from forgeasync.config import BufferSection, ScorerSection, StaleGroups
from forgeasync.plugins.simulator import Prediction, run, simulate
from forgeasync.rollouts import PayloadBudget, plan_rows
from forgeasync.runtime import ReplicaTable
from forgeasync.scoring import Dispatcher
from forgeasync.weights import Manifest, WeightLedger
from tests.support.profiles import simple_profile, small_run


def _run() -> Prediction:
    """A run in which every rule decides something."""
    run = small_run(
        num_steps=16,
        num_replicas=3,
        max_num_seqs=6,
        num_data_ranks=2,
        tokens_per_row=512,
        buffer=BufferSection(stale_groups=StaleGroups.DROP),
        scorer=ScorerSection(num_replicas=2, num_workers=1, max_in_flight=4),
        payload_capacity_bytes=9 * 10**6,
        largest_group_bytes=10**6,
    )
    times = {"token_s": 5e-4, "score_s": 0.03, "fetch_s": 1.5, "publish_s": 0.1, "swap_s": 0.02}
    return simulate(run, simple_profile(lengths=(10.0, 20.0, 40.0, 160.0), **times))


def _worst_replica(self: ReplicaTable, num_rollouts: int) -> int | None:
    """Always the first one."""
    chosen = self.present[0]
    chosen.num_live += num_rollouts
    return chosen.number


def _one_row_more(lengths: list[int], *, num_ranks: int, **options: Any) -> list[list[list[int]]]:
    plan = plan_rows(lengths, num_ranks=num_ranks, **options)
    return [*plan, [[]] * num_ranks]


_acquire = WeightLedger.acquire


def _acquire_even(self: WeightLedger, reader: int, *, newer_than: int, now_s: float) -> Manifest | None:
    is_even = self.newest is not None and self.newest.version % 2 == 0
    return _acquire(self, reader, newer_than=newer_than, now_s=now_s) if is_even else None


_reserve = PayloadBudget.reserve


def _reserve_three(self: PayloadBudget, group_id: int, worst_case_bytes: int) -> bool:
    return len(self._reserved) < 3 and _reserve(self, group_id, worst_case_bytes)


BROKEN: dict[str, tuple[object, str, Callable[..., object]]] = {
    "age bound": (ReplayBuffer, "_is_bound", lambda self: self._num_in_flight >= 2),
    "load": (LoadController, "step", lambda self, load: setattr(self, "bound", self._groups_per_step)),
    "generator": (ReplicaTable, "assign", _worst_replica),
    "scorer room": (Dispatcher, "_room", lambda self, rank: 1 - len(self._replicas[rank].items) - rank),
    "payloads": (PayloadBudget, "reserve", _reserve_three),
    "staging": (WeightLedger, "acquire", _acquire_even),
    "rows": (run, "plan_rows", _one_row_more),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_changes_the_run(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _run()
    owner, name, broken = BROKEN[rule]
    monkeypatch.setattr(owner, name, broken)
    assert _run().steps != before.steps
