"""Results of steps and what is wrong with them, on one rank. Several ranks: test_bad_steps.py."""

import math

import pytest
import torch

from forgeasync.config import BadStepsSection, OnBadStep
from forgeasync.trainer import (
    BadStep,
    BadStepMonitor,
    BadStepsEndRun,
    MinibatchResult,
    NonFiniteWeights,
    SpikeRule,
    StepJudge,
    StepMemory,
    StepResult,
    describe_non_finite,
    describe_rows,
    merge_step_results,
    require_finite,
    value_ranges,
)

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([True, True, False, True])
FINE = torch.tensor([1.0, -2.0, 3.0, 0.5])


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_first_tensor_that_is_not_finite_is_named(value: float) -> None:
    broken = torch.tensor([0.0, value])
    assert describe_non_finite([]) is None
    assert describe_non_finite(value_ranges([("a", FINE), ("scalar", torch.tensor(4.0))])) is None
    expected = "b has values that are nan or infinite on trainer rank 0"
    # All that has a floating-point value counts, on a rank that has a part of it.
    others = {"gradient": None, "count": torch.tensor([7]), "empty": torch.zeros(0), "half": FINE.bfloat16()}
    named = [*others.items(), ("a", FINE), ("b", broken), ("c", broken)]
    assert describe_non_finite(value_ranges(named)) == expected
    require_finite([("a", FINE)], what="export")
    with pytest.raises(NonFiniteWeights) as raised:
        require_finite(named, what="export")
    assert str(raised.value) == f"export is refused: {expected}"


def test_a_row_is_described_by_the_first_input_that_is_not_finite() -> None:
    hidden = torch.tensor([1.0, 1.0, NAN, 1.0])
    fine = (2, torch.tensor(0.5), {"a": FINE, "b": None, "c": hidden}, MASK)
    assert describe_rows([fine]) is None
    broken = torch.tensor([1.0, 1.0, NAN, -INF])
    expected = "the loss of row 3 on trainer rank 0 is 0.5: c of its target 3 is -inf"
    inputs = {"a": FINE, "b": None, "c": broken, "d": broken}
    assert describe_rows([fine, (3, torch.tensor(0.5), inputs, MASK)]) == expected
    expected = (
        "the loss of row 3 on trainer rank 0 is nan, although all that the objective is given is finite"
    )
    assert describe_rows([fine, (3, torch.tensor(NAN), {"a": FINE, "c": hidden}, MASK)]) == expected


def test_what_a_judge_says_of_a_step() -> None:
    section = BadStepsSection(
        on_nan=OnBadStep.STOP, on_spike=OnBadStep.ROLLBACK, spike_factor=2.0, spike_window=4
    )
    judge, of_nan = StepJudge(section), StepJudge(BadStepsSection())
    assert judge.metrics() == of_nan.metrics() == {}
    broken = value_ranges([("a", FINE), ("b", torch.tensor([NAN]))])
    for one in (judge, of_nan):
        for _ in range(4):
            one.made(3.0)
        assert one.judge(None, broken, 6.0) is None, "a norm of numbers says that gradients are numbers"
        assert one.judge_weights(value_ranges([("a", FINE)])) is None
    assert judge.metrics() == {"grad_norm_limit": 6.0} and of_nan.metrics() == {}
    assert of_nan.judge(None, [], 1e30) is None
    spike = judge.judge(None, [], 6.5)
    assert spike is not None and spike.remedy is OnBadStep.ROLLBACK and "is 6.5, more than 6" in spike.reason
    for of_rows, gradients, norm, reason in (
        ("row 1", broken, 1.0, "row 1"),
        ("row 1", broken, NAN, "row 1"),
        (None, broken, NAN, "b has values that are nan or infinite on trainer rank 0"),
        (None, [], math.inf, "the norm of all gradients is inf"),
    ):
        assert judge.judge(of_rows, gradients, norm) == BadStep(reason=reason, remedy=OnBadStep.STOP)
    weights = judge.judge_weights(broken)
    assert weights is not None and weights.remedy is OnBadStep.STOP
    assert weights.reason.startswith("of the weights after it: b has values")


def test_a_spike_is_more_than_the_factor_times_the_median_of_steps_with_a_gradient() -> None:
    rule = SpikeRule(factor=2.0, window=4)
    for norm in (1.0, 0.0, 3.0, 2.0):
        rule.made(norm)
        assert rule.limit is None and rule.describe(1e30) is None, "too few to tell"
    rule.made(100.0)
    assert rule.limit == 5.0, "twice the median of 1, 3, 2 and 100"
    assert rule.describe(5.0) is None
    assert "is 5.001, more than 5" in (rule.describe(5.001) or "")
    rule.made(2.5)
    assert rule.norms == [3.0, 2.0, 100.0, 2.5] and rule.limit == 5.5


def _result(skip_reason: str | None, *, ends_run: bool = False) -> StepResult:
    return StepResult(
        policy_version=1,
        num_targets=1,
        num_padding_tokens=0,
        train_s=0.0,
        metrics={},
        skip_reason=skip_reason,
        ends_run=ends_run,
    )


def test_bad_steps_in_a_row_end_the_run_and_one_that_is_to_stop_it_at_once() -> None:
    watch = BadStepMonitor(2)
    for step, reason in enumerate(("nan", None, "nan", None), start=1):
        watch.count(step, _result(reason))
    watch.count(5, _result("nan"))
    with pytest.raises(BadStepsEndRun, match=r"2 steps in a row were bad .* the last one, 6, because inf"):
        watch.count(6, _result("inf"))
    with pytest.raises(BadStepsEndRun, match=r"step 1 was not made, which ends the run .*: inf"):
        BadStepMonitor(9).count(1, _result("inf", ends_run=True))
    with pytest.raises(AssertionError):
        BadStepMonitor(0)


def test_a_batch_of_one_step_is_that_step() -> None:
    metrics = {"loss": 0.1 + 0.2, "routing/num_without_record": 3.0, "correction/weight_max": -1.0}
    step = MinibatchResult(
        num_targets=5, num_padding_tokens=2, metrics=metrics, bad=BadStep(reason="nan", remedy=OnBadStep.SKIP)
    )
    found = merge_step_results([step], num_steps=1, is_rolled_back=False, policy_version=3, train_s=1.0)
    assert found.metrics == metrics | {"trainer/num_optimizer_steps": 0.0}
    assert (found.num_targets, found.num_padding_tokens, found.skip_reason) == (5, 2, "nan")


def test_what_only_some_steps_have_is_a_mean_over_those() -> None:
    steps = [
        MinibatchResult(num_targets=1, num_padding_tokens=0, metrics=metrics, bad=None)
        for metrics in (
            {"objective/gate": 1.0, "routing/num_without_record": 2.0},
            {"objective/gate": 4.0, "routing/num_without_record": 3.0, "mismatch/with_replay_kl": 0.5},
        )
    ]
    found = merge_step_results(
        steps, num_steps=2, is_rolled_back=False, policy_version=1, train_s=0.0
    ).metrics
    assert found["objective/gate"] == 2.5 and found["mismatch/with_replay_kl"] == 0.5
    assert found["routing/num_without_record"] == 5.0


def test_what_is_not_remembered_is_refused() -> None:
    memory: StepMemory[str] = StepMemory(first_version=0)
    for step in (1, 2):
        memory.begin(step, "batch")
        memory.complete(step)
    memory.save(1)
    assert [step for step, _ in memory.after(1)] == [2]
    with pytest.raises(ValueError, match="came back with version 0; must be one from 1"):
        memory.after(0)
    with pytest.raises(ValueError, match="to 2, the last complete step"):
        memory.after(3)
