"""What engines compute in loads of the run's own batches besides decode steps and prompts, and what sharing
cores costs them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forgeasync.buffer import Start
from forgeasync.profile import MOST_CROWDING
from forgeasync.profiling.sampled_groups import Sampled
from forgeasync.simulation import (
    STALL_SHARE,
    Clock,
    DrawnRollout,
    Engine,
    EngineCost,
    SimulatedGroup,
    crowded_work,
)

NUM_CROWDINGS = 100
"""Parts of the range in which ``Cores.generator_crowding`` is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Batches that were sampled one after the other."""

    batches: Sequence[Sequence[Sampled]]
    computed_s: float
    """Processor seconds of all engines' processes meanwhile, without ``handing_over_s``."""
    handing_over_s: float
    """Processor seconds of the threads that take requests, prepare responses and hand them over."""
    busy_s: float
    """Seconds in which engines had sequences, added up over engines."""
    engine_cores: float
    """Cores that one engine keeps busy alone."""

    @property
    def core_share(self) -> float:
        """Share of time that engines with sequences had their cores; others had them for the rest.

        While responses are handed over they stand still for a part of the time, and want none.
        """
        wanted_s = self.engine_cores * (self.busy_s - STALL_SHARE * self.handing_over_s)
        return min(1.0, self.computed_s / wanted_s) if wanted_s > self.computed_s else 1.0

    @property
    def response_s(self) -> float:
        """``Profile.response_s``: processor seconds for each turn."""
        return self.handing_over_s / self.num_turns

    @property
    def num_turns(self) -> int:
        """Turns of its rollouts; responses have one."""
        return sum(max(1, num) for batch in self.batches for one in batch for num in _turns(one))


def together(loads: Sequence[Load]) -> Load:
    """Return several loads of the same engines as one."""
    return Load(
        batches=list(itertools.chain.from_iterable(load.batches for load in loads)),
        computed_s=math.fsum(load.computed_s for load in loads),
        handing_over_s=math.fsum(load.handing_over_s for load in loads),
        busy_s=math.fsum(load.busy_s for load in loads),
        engine_cores=loads[0].engine_cores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """What steps and prompts alone do not say."""

    step_rest_s: float
    """Processor seconds for each decode step, with cores of its own."""
    crowding: float
    """``Cores.generator_crowding``."""


def fit_engines(loads: Sequence[Load], cost: EngineCost, *, num_replicas: int) -> EngineFit:
    """Return what engines need for steps besides ``cost``, and what sharing cores costs them.

    What their steps and prompts take of a load is simulated, with the lengths that were sampled. They compute
    this and ``step_rest_s`` for each step, 1 + crowding * (1 - ``core_share``) times. The two unknown numbers
    are those with the least squares of relative errors; neither is negative. Loads tell one from the other
    where some had more of their cores than others, and where some are many steps with few sequences.
    """
    known = [_known(load, cost, num_replicas=num_replicas) for load in loads]
    computed_s = np.array([load.computed_s for load in loads])
    work_s, num_steps = np.array([(one.work_s, one.num_steps) for one in known]).T
    best = EngineFit(step_rest_s=0.0, crowding=0.0)
    least = math.inf
    for number in range(NUM_CROWDINGS + 1):
        crowding = MOST_CROWDING * number / NUM_CROWDINGS
        more = np.array([crowded_work(load.core_share, crowding) for load in loads])
        # What is missing of every load's computed_s, and what a second for each step adds to it: relative.
        missing, added = 1.0 - work_s * more / computed_s, num_steps * more / computed_s
        step_s = max(0.0, float(added @ missing / (added @ added)))
        error = float(np.square(missing - step_s * added).sum())
        if error < least:
            best, least = EngineFit(step_rest_s=step_s, crowding=crowding), error
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    num_steps: float
    work_s: float
    """Processor seconds of its steps and prompts, alone."""


def _known(load: Load, cost: EngineCost, *, num_replicas: int) -> _Known:
    played = [_play(batch, cost, num_replicas=num_replicas) for batch in load.batches]
    return _Known(
        num_steps=sum(num_steps for _, num_steps in played),
        work_s=cost.cores * sum(busy_s for busy_s, _ in played),
    )


def _play(batch: Sequence[Sampled], cost: EngineCost, *, num_replicas: int) -> tuple[float, float]:
    """Return the seconds that all engines together take for steps and prompts of a batch, each alone on its
    host, and the number of their steps."""
    busy_s = num_steps = 0.0
    for rank in range(num_replicas):
        clock = Clock(num_cores=1)
        alone = replace(cost, cores=0.0, step_rest_s=0.0, response_s=0.0, response_stall_s=0.0)
        engine = Engine(rank, alone, clock, on_turn=lambda sequence: None, version=0)
        engine.add(sequence for one in batch[rank::num_replicas] for sequence in _simulated(one).sequences)
        while clock.step():
            pass
        busy_s += engine.total_busy_s
        num_steps += engine.num_steps
    return busy_s, num_steps


def _simulated(sampled: Sampled) -> SimulatedGroup:
    """The group with the lengths that it has; the turns of an episode together, as one response."""
    group = sampled.group
    rollouts = [
        DrawnRollout(
            num_prompt_tokens=one.branches[0].num_prompt_tokens,
            turns=(max(1, one.num_sampled_tokens),),
            latencies_s=(),
            score_s=0.0,
        )
        for one in group.rollouts
    ]
    start = Start(group_id=group.group_id, draw_id=group.draw_id, task=group.task)
    return SimulatedGroup(start, rollouts, 0.0)


def _turns(sampled: Sampled) -> tuple[int, ...]:
    """Turns of each rollout; responses have one."""
    return sampled.num_turns or (1,) * len(sampled.group.rollouts)
