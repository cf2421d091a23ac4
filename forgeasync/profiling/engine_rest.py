"""What an engine's process needs besides decode steps and prompts, as what is left over of two loads.

Many groups at once make few steps with many sequences, one group after the other makes many steps with few.
What is needed for each step and what is needed for each response are told apart by this.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forgeasync.buffer.decisions import Start
from forgeasync.profile.fitting import fit_not_negative
from forgeasync.profiling.sampled_groups import Sampled
from forgeasync.simulation.clock import Clock, core_second
from forgeasync.simulation.draws import DrawnRollout
from forgeasync.simulation.engine import STALL_SHARE, Engine, EngineCost
from forgeasync.simulation.groups import SimulatedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Batches that were sampled one after the other."""

    batches: Sequence[Sequence[Sampled]]
    computed_s: float
    """Processor seconds of all engines' processes meanwhile."""
    wanted_s: float
    """Processor seconds that engines with sequences would have had if nobody else had used their cores."""

    @property
    def core_share(self) -> float:
        """Share of time that engines with sequences had their cores; others had them for the rest."""
        return min(1.0, self.computed_s / self.wanted_s)

    @property
    def num_turns(self) -> int:
        """Turns of its rollouts; responses have one."""
        return sum(max(1, num) for batch in self.batches for one in batch for num in _turns(one))

    def with_handing_over(self, response_s: float) -> "Load":
        """Return the load with what engines' processes wanted besides, where a response takes them so long:
        the thread that hands responses over wants a core while another one decodes."""
        beside_s = (1.0 - STALL_SHARE) * response_s * self.num_turns
        return replace(self, wanted_s=self.wanted_s + beside_s)

    def alone_s(self, crowding: float) -> float:
        """Processor seconds that it would have taken with cores to itself (``Cores.crowding``)."""
        return self.computed_s * self.speed(crowding)

    def speed(self, crowding: float) -> float:
        """What a second of a core brought, as a share of what it brings a proc that has it to itself."""
        return core_second(self.core_share, crowding)


def together(loads: Sequence[Load]) -> Load:
    """Return several loads as one."""
    return Load(
        batches=list(itertools.chain.from_iterable(load.batches for load in loads)),
        computed_s=sum(load.computed_s for load in loads),
        wanted_s=sum(load.wanted_s for load in loads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRest:
    """What a profile does not say of steps and prompts."""

    step_s: float
    """Processor seconds for each decode step."""
    response_s: float
    """Processor seconds for each turn."""


def engine_rest(loads: Sequence[Load], cost: EngineCost, *, crowding: float, num_replicas: int) -> EngineRest:
    """Return what engines need for steps and turns besides ``cost``, never below 0.

    What their steps and prompts take of a load is simulated, with the lengths that were sampled, ``cost`` and
    ``cost.cores``. Each load counts as much as its number of turns, and as what it takes alone: ``crowding``
    is ``Cores.crowding``.
    """
    played = [_played(load, cost, num_replicas=num_replicas) for load in loads]
    terms = np.array([[one.num_steps / one.num_turns, 1.0] for one in played])
    rests_s = [
        max(0.0, load.alone_s(crowding) - one.known_s) / one.num_turns
        for load, one in zip(loads, played, strict=True)
    ]
    step_s, turn_s = fit_not_negative(terms, np.array(rests_s))
    return EngineRest(step_s=step_s, response_s=turn_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    num_steps: float
    num_turns: int
    known_s: float
    """Processor seconds of its steps and prompts."""


def _played(load: Load, cost: EngineCost, *, num_replicas: int) -> _Played:
    played = [_play(batch, cost, num_replicas=num_replicas) for batch in load.batches]
    return _Played(
        num_steps=sum(num_steps for _, num_steps in played),
        num_turns=load.num_turns,
        known_s=cost.cores * sum(busy_s for busy_s, _ in played),
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
