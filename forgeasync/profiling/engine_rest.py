"""What an engine's process needs for responses besides decode steps and prompts, as what is left over."""

from collections.abc import Sequence
from dataclasses import replace

from forgeasync.buffer.decisions import Start
from forgeasync.profiling.sampled_groups import Sampled
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.draws import DrawnRollout
from forgeasync.simulation.engine import Engine, EngineCost
from forgeasync.simulation.groups import SimulatedGroup


def response_s(
    batches: Sequence[Sequence[Sampled]], computed_s: float, cost: EngineCost, *, num_replicas: int
) -> float:
    """Return processor seconds for each turn of batches that were sampled one after the other, never below 0.

    ``computed_s`` is the processor time of all engines' processes meanwhile. What their steps and prompts
    take of it is simulated, with the lengths that were sampled, ``cost`` and ``cost.cores``.
    """
    known_s = cost.cores * sum(_busy_s(batch, cost, num_replicas=num_replicas) for batch in batches)
    num_turns = sum(max(1, num) for batch in batches for one in batch for num in _turns(one))
    return max(0.0, computed_s - known_s) / num_turns


def _busy_s(batch: Sequence[Sampled], cost: EngineCost, *, num_replicas: int) -> float:
    """Seconds that all engines together take for steps and prompts of a batch, each alone on its host."""
    busy_s = 0.0
    for rank in range(num_replicas):
        clock = Clock(num_cores=1)
        alone = replace(cost, cores=0.0, response_s=0.0)
        engine = Engine(rank, alone, clock, on_turn=lambda sequence: None, version=0)
        engine.add(sequence for one in batch[rank::num_replicas] for sequence in _simulated(one).sequences)
        while clock.step():
            pass
        busy_s += engine.total_busy_s
    return busy_s


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
