"""The simulator has no rules of its own: breaking a real one changes the run, and none is written twice."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import forgeasync.plugins.simulator
from forgeasync.buffer import AccountingLedger, BatchLine, LoadController, ReplayBuffer
from forgeasync.config import BufferSection, ScorerSection, StaleGroups
from forgeasync.plugins.simulator import Prediction, run, simulate
from forgeasync.rollouts import PayloadBudget, row_plan
from forgeasync.runtime import ReplicaTable
from forgeasync.scoring import Dispatcher
from forgeasync.weights import Manifest, WeightLedger
from tests.support.profiles import simple_profile, small_run

RULES = (
    ReplayBuffer,
    AccountingLedger,
    LoadController,
    BatchLine,
    ReplicaTable,
    Dispatcher,
    PayloadBudget,
    WeightLedger,
)


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
    profile = simple_profile(
        lengths=(10.0, 20.0, 40.0, 160.0), token_s=5e-4, score_s=0.03, fetch_s=1.5, publish_s=0.1, swap_s=0.02
    )
    return simulate(run, profile)


def _worst_replica(self: ReplicaTable, num_rollouts: int) -> int | None:
    """Always the first one."""
    chosen = self.present[0]
    chosen.num_live += num_rollouts
    return chosen.number


def _one_row_more(lengths: list[int], *, tokens_per_row: int, num_ranks: int) -> list[list[list[int]]]:
    return [
        *row_plan.plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks),
        [[]] * num_ranks,
    ]


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


def _public_methods(one: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(one, inspect.isfunction) if not name.startswith("_")}


def test_no_class_of_the_simulator_is_a_rule_again() -> None:
    """A copy of a rule would have its events and decisions; no class here has three of one rule's."""
    folder = Path(forgeasync.plugins.simulator.__file__).parent
    seen = 0
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            seen += 1
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            assert not node.bases or {ast.unparse(base) for base in node.bases}.isdisjoint(
                rule.__name__ for rule in RULES
            ), f"{file.name}: {node.name} changes a rule"
            for rule in RULES:
                common = methods & _public_methods(rule)
                assert len(common) < 3, f"{file.name}: {node.name} is like {rule.__name__}: {common}"
    assert seen > 10


def test_every_rule_is_used_as_it_is() -> None:
    folder = Path(forgeasync.plugins.simulator.__file__).parent
    text = "\n".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    for name in (
        "ReplayBuffer(",
        "ReplicaTable(",
        "Dispatcher(",
        "PayloadBudget(",
        "WeightLedger(",
        "plan_rows(",
    ):
        assert name in text
