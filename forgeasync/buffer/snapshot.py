"""What a run that is resumed has to know of its replay buffer: prompts, not groups.

The arrays of sampled groups live in shared memory and are gone with the run, so a prompt whose group was
under way starts again, with the same random draws. Expected lengths, the bound on load and the window of the
composition metrics are not kept: they are measured anew.
"""

from dataclasses import dataclass

from forgeasync.buffer.submissions import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Deficit:
    """Weight of lost groups of one stratum that no other group has taken over yet."""

    source: str
    length_bucket: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """A buffer between two batches."""

    trainer_version: int
    num_submitted: int
    """Position in the data's order: submitted prompts are its first ones."""
    next_group_id: int
    started: tuple[Submission, ...]
    """Of groups being sampled or scored, in the order in which they started."""
    complete: tuple[Submission, ...]
    """Of groups that waited for training; what was sampled for them is lost."""
    pending: tuple[Submission, ...]
    num_reissued: int
    num_restarted: int
    deficits: tuple[Deficit, ...]
    num_censored: int
