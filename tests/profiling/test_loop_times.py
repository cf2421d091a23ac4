"""What the loops of a run need, from what had passed when its steps were recorded."""

import asyncio
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from forgeasync.actors import GeneratorRouter
from forgeasync.config import load_config
from forgeasync.controller import StepTimes
from forgeasync.profile import Distribution
from forgeasync.profiling import LoopTimes, Mark, loop_times, short_run_of

MODULE = import_module("forgeasync.profiling.loop_times")
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_moe_cpu.yaml"


def mark(at_s: float, *, processor_s: float, num_responses: int, eval_s: float = 0.0) -> Mark:
    times = StepTimes(
        step_s=2.0 + eval_s, wait_for_batch_s=0.5, train_s=1.0, publish_weights_s=0.25, eval_s=eval_s
    )
    return Mark(
        at_s=at_s,
        processor_s=processor_s,
        scorers_s=3.0 * processor_s,
        num_responses=num_responses,
        times=times,
    )


def test_processor_time_by_response_and_what_is_left_of_a_step() -> None:
    found = loop_times(
        [
            mark(10.0, processor_s=5.0, num_responses=100),
            mark(12.0, processor_s=5.2, num_responses=110),
            # Training waited for an evaluation.
            mark(17.0, processor_s=6.0, num_responses=120, eval_s=3.0),
        ]
    )
    assert (found.response_s, found.score_s) == pytest.approx((1.0 / 20, 3.0 / 20))
    assert found.run_s == pytest.approx(4.0), "7 s without the evaluation"
    # 2 s and 5 s of which 1.75 s and 4.75 s are known.
    assert found.between_s.mean.mean == pytest.approx(0.25)


def test_a_window_without_responses_has_times() -> None:
    found = loop_times(
        [mark(0.0, processor_s=1.0, num_responses=8), mark(1.0, processor_s=1.5, num_responses=8)]
    )
    assert found.response_s == pytest.approx(0.5) and found.between_s.mean.mean == 0.0


def test_the_short_run_is_the_run_but_for_what_it_leaves_behind() -> None:
    config = load_config([str(CONFIG)], ["checkpoint.folder=elsewhere"])
    short = short_run_of(config)
    assert short.max_steps == MODULE.NUM_STEPS > MODULE.NUM_WARMUP_STEPS
    assert (short.checkpoint.every_steps, short.checkpoint.folder) == (None, None)
    assert (short.evaluation.num_problems, short.evaluation.sets) == (1, ())
    assert short.evaluation.every_steps > short.max_steps
    assert short.trainer.optimizer.learning_rate < 1e-6
    kept = config.model_dump(exclude={"max_steps", "checkpoint", "evaluation", "trainer"})
    assert short.model_dump(exclude={"max_steps", "checkpoint", "evaluation", "trainer"}) == kept
    without = {"optimizer": {"learning_rate"}}
    assert short.trainer.model_dump(exclude=without) == config.trainer.model_dump(exclude=without)


def test_engines_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "IDLE_S", 0.0)
    busy_s = iter([1.0, 1.5, 1.5, 1.6, 9.9])

    async def stats() -> list[SimpleNamespace]:
        now_s = next(busy_s)
        return [SimpleNamespace(busy_s=now_s), SimpleNamespace(busy_s=0.0)]

    asyncio.run(MODULE._until_idle(cast(GeneratorRouter, SimpleNamespace(stats=stats))))
    assert next(busy_s) == 1.6, "idle as soon as nothing was added"


def test_the_controllers_part_of_a_response_is_not_counted_twice() -> None:
    found = LoopTimes(response_s=0.010, score_s=0.0, run_s=1.0, between_s=Distribution.point(0.0))
    assert found.rest_s(controller_s=0.003) == pytest.approx(0.007)
    assert found.rest_s(controller_s=0.011) == 0.0
