"""Episodes of one engine: trajectories that are sampled turn by turn and stay here until they are taken.

The arrays of a trajectory never travel: an environment sends the tokens to append and gets the turn's text.
A group of episodes is open from its first turn until it is taken or dropped, so that it can be cancelled
between two turns too, and so that updates know how many tokens it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forgeasync.config.generator import SamplingSection
from forgeasync.generator.engine import EngineSequence, GeneratorEngine
from forgeasync.generator.interruption import RunningGroup
from forgeasync.generator.reports import GroupCancelled
from forgeasync.rollouts.rollout import FinishReason, Rollout
from forgeasync.rollouts.trajectory import EpisodeId, SampledTurn


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    key: int
    """The number that the requests of the group carry in the engine."""
    group: RunningGroup
    episodes: dict[int, EngineSequence] = field(default_factory=dict)


class EngineEpisodes:
    """The open groups of an engine. Everything runs on its event loop."""

    def __init__(self, engine: GeneratorEngine) -> None:
        self._engine = engine
        self._groups: dict[int, _OpenGroup] = {}
        # Turns of theirs can still be on their way here. Groups that failed or were evaluated, not all.
        self._dropped: set[int] = set()

    async def add_turn(
        self,
        episode: EpisodeId,
        given_ids: np.ndarray,
        *,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
    ) -> SampledTurn:
        """Append tokens to an episode, which begins with its first turn, and sample the model's next turn.

        ``max_tokens`` bounds the turn, and trajectory and turn together fit the engine's context. The seed is
        that of the group; every turn of every episode draws its own noise.

        Raises:
            GroupCancelled: the group was cancelled or dropped.
        """
        if episode.group_id in self._dropped:
            raise GroupCancelled
        if episode.group_id not in self._groups:
            key, group = self._engine.open_group(episode.group_id if episode.group_id >= 0 else None)
            self._groups[episode.group_id] = _OpenGroup(key=key, group=group)
        opened = self._groups[episode.group_id]
        if episode.index not in opened.episodes:
            opened.episodes[episode.index] = self._engine.new_sequence(episode.index)
        sequence = opened.episodes[episode.index]
        sequence.trajectory.give(given_ids)
        num_before = sequence.trajectory.num_tokens
        await self._engine.sample_turn(
            sequence,
            group_key=opened.key,
            group=opened.group,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
        )
        return self._engine.turn(sequence, num_before)

    def take(self, group_id: int, is_truncated: Sequence[bool]) -> tuple[Rollout, ...]:
        """All episodes of a group as rollouts, in their order; the group is closed.

        A truncated one has finish reason ``length``, however its last turn ended.
        """
        opened = self._groups.pop(group_id)
        self._engine.close_group(opened.key)
        assert sorted(opened.episodes) == list(range(len(is_truncated))), "every episode has a turn"
        return tuple(
            self._engine.rollout(opened.episodes[index], FinishReason.LENGTH if is_cut else None)
            for index, is_cut in enumerate(is_truncated)
        )

    async def drop(self, group_id: int) -> None:
        """End whatever is sampled for a group and forget it."""
        self._dropped.add(group_id)
        opened = self._groups.pop(group_id, None)
        if opened is not None:
            await self._engine.cancel([opened.key])
            self._engine.close_group(opened.key)
