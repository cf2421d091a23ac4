"""Engines of machines that do not exist, and groups for them."""

from collections.abc import Mapping, Sequence

from forgeasync.buffer import Start
from forgeasync.plugins.simulator import (
    Clock,
    DecodePoint,
    DecodeTable,
    DrawnRollout,
    EngineCost,
    SimulatedGroup,
)
from forgeasync.rollouts import Task


def play(clock: Clock) -> None:
    """Go on until nothing happens any more."""
    while clock.step():
        pass


def decode_table(steps_s: Mapping[tuple[int, int], float]) -> DecodeTable:
    """By the number of running sequences and the tokens of the mean context."""
    points = [
        DecodePoint(num_running=running, num_context_tokens=context, step_s=step_s)
        for (running, context), step_s in steps_s.items()
    ]
    return DecodeTable(points)


def engine_cost(decode: DecodeTable, *, prefill_s: float, **limits: float) -> EngineCost:
    """``prefill_s`` is for a token of a prompt."""
    known = {"max_num_seqs": 8, "max_kv_tokens": 10**9, "kv_block_tokens": 1, "shares_prefixes": False}
    return EngineCost(decode=decode, prefill_s_per_token=prefill_s, **(known | limits))


def made_group(group_id: int, lengths: Sequence[int], *, num_prompt: int = 1) -> SimulatedGroup:
    """A group with responses of these lengths."""
    task = Task(task_id=str(group_id), prompt="", answer="", source_index=0, source="s")
    rollouts = [
        DrawnRollout(num_prompt_tokens=num_prompt, num_tokens=length, score_s=0.0) for length in lengths
    ]
    return SimulatedGroup(Start(group_id=group_id, draw_id=group_id, task=task), rollouts)
