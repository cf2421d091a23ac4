"""One group in the replay buffer, from its start to its end."""

from dataclasses import dataclass

from forgeasync.buffer.submissions import Submission
from forgeasync.rollouts.rollout import Group


@dataclass(slots=True, kw_only=True)
class Entry:
    """A group's state in the buffer."""

    submission: Submission
    deadline: int
    """Last optimizer step that may train on it, as far as is known; rises with progress."""
    sampled: Group | None = None
    """The group with all its rollouts; None until they are sampled."""
    group: Group | None = None
    """The group with the rollouts that are trained on and their rewards; None until it is complete."""
    is_expired: bool = False
    """Whether the group is in flight past its deadline: the trainer no longer waits for it."""

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Numbers of sampled tokens of all its rollouts; None until they are sampled."""
        if self.sampled is None:
            return None
        return tuple(rollout.num_sampled_tokens for rollout in self.sampled.rollouts)
