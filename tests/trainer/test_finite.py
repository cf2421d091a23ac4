"""What is not finite is found and named, on one rank. Several ranks: tests/trainer/test_skipped_steps.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forgeasync.trainer import (
    NonFiniteWeights,
    agree,
    describe_non_finite,
    describe_row,
    require_finite,
    value_ranges,
)
from tests.support.processes import alone_in_this_process

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([True, True, False, True])
FINE = torch.tensor([1.0, -2.0, 3.0, 0.5])


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    with alone_in_this_process(tmp_path):
        yield


def test_the_problem_nearest_to_the_cause_is_the_answer() -> None:
    assert agree() is None and agree(None, None) is None
    assert agree(None, "second", "third") == "second"
    assert agree("first", "second") == "first"


def test_ranges_of_all_that_has_a_floating_point_value() -> None:
    named = {
        "weight": torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=torch.bfloat16),
        "no gradient": None,
        "count": torch.tensor([7]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(4.0, requires_grad=True),
        "broken": torch.tensor([1.0, NAN]),
    }
    ranges = value_ranges(named.items())
    found = {name: ends.tolist() for name, ends in ranges}
    assert found.pop("broken") == pytest.approx([NAN, NAN], nan_ok=True)
    assert found == {"weight": [-3.0, 2.0], "scalar": [4.0, 4.0]}
    assert {ends.dtype for _, ends in ranges} == {torch.float32}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_first_tensor_that_is_not_finite_is_named(value: float) -> None:
    broken = torch.tensor([0.0, value])
    assert describe_non_finite([]) is None
    assert describe_non_finite(value_ranges([("a", FINE), ("b", FINE)])) is None
    expected = "b has values that are nan or infinite on trainer rank 0"
    named = [("a", FINE), ("b", broken), ("c", broken)]
    assert describe_non_finite(value_ranges(named)) == expected
    require_finite([("a", FINE)], what="export")
    with pytest.raises(NonFiniteWeights) as raised:
        require_finite(named, what="export")
    assert str(raised.value) == f"export is refused: {expected}"


def test_a_row_is_described_by_the_first_input_that_is_not_finite() -> None:
    hidden = torch.tensor([1.0, 1.0, NAN, 1.0])
    assert describe_row(3, torch.tensor(0.5), {"a": FINE, "b": None, "c": hidden}, MASK) is None
    broken = torch.tensor([1.0, 1.0, NAN, -INF])
    expected = "the loss of row 3 on trainer rank 0 is 0.5: c of its target 3 is -inf"
    inputs = {"a": FINE, "b": None, "c": broken, "d": broken}
    assert describe_row(3, torch.tensor(0.5), inputs, MASK) == expected
    expected = (
        "the loss of row 3 on trainer rank 0 is nan, although all that the objective is given is finite"
    )
    assert describe_row(3, torch.tensor(NAN), {"a": FINE, "c": hidden}, MASK) == expected
