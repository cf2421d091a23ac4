"""Episodes of one engine: trees of turns that are sampled and stored here until they are taken.

The arrays of a trajectory stay in the engine's process: an environment sends the tokens to append and gets
the sampled ids and their text. A group of episodes is open from its first turn until it is taken or dropped.
So it can be cancelled between two turns, and updates know its number of tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forgeasync.config import SamplingSection
from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.reports import GroupCancelled
from forgeasync.generator.turns import EngineEpisode, EngineTurn
from forgeasync.generator.updates import RunningGroup
from forgeasync.rollouts import EpisodeId, LoggedTurn, Rollout, SampledTurn

MAX_ENDED_GROUPS = 65_536
"""Number of ended groups to remember, so that their late turns are refused."""


@dataclass(slots=True, kw_only=True)
class _OpenEpisode:
    episode: EngineEpisode
    turns: list[EngineTurn] = field(default_factory=list)

    def begin(self, engine: GeneratorEngine, after: int | None, given_ids: np.ndarray) -> EngineTurn:
        """Add and return the next turn, without sampled tokens."""
        turn = engine.first_turn(self.episode) if after is None else self.turns[after].continued()
        turn.number = len(self.turns)
        self.turns.append(turn)
        turn.trajectory.give(given_ids)
        return turn

    def claim(self, after: int | None, given_ids: np.ndarray) -> EngineTurn | None:
        """Return a restored turn that matches a repeated request, or None; it can be claimed once.

        Prefers an unfinished turn, then the last one. A turn that others follow has reached its caller
        already.
        """
        followed = {turn.after for turn in self.turns}
        candidates = [
            turn
            for turn in self.turns
            if turn.is_claimable
            and turn.after == after
            and turn.number not in followed
            and np.array_equal(turn.trajectory.given_ids, given_ids)
        ]
        if not candidates:
            return None
        turn = max(candidates, key=lambda turn: (turn.end is None, turn.number))
        turn.is_claimable = False
        return turn


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    group: RunningGroup
    episodes: dict[EpisodeId, _OpenEpisode] = field(default_factory=dict)


class EngineEpisodes:
    """Open groups of episodes of an engine. All methods run on its event loop."""

    def __init__(self, engine: GeneratorEngine) -> None:
        self._engine = engine
        self._groups: dict[int, _OpenGroup] = {}
        self._ended_groups: OrderedDict[int, None] = OrderedDict()
        """Groups that were taken or dropped, whose turns may still arrive."""
        self._dropped_episodes: set[EpisodeId] = set()

    async def add_turn(
        self,
        episode: EpisodeId,
        after: int | None,
        given_ids: np.ndarray,
        *,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
        repeated: bool = False,
    ) -> SampledTurn:
        """Sample a turn of an episode after another of its turns and after further given tokens.

        The first turn opens the episode. Calls for one episode may overlap.

        Args:
            after: Index of the previous turn; None: the turn starts a new tree.
            max_tokens: Maximum length of the turn; path and turn together must fit the engine's context.
            seed: Seed of the group; every turn of every episode derives its own noise from it.
            repeated: Whether this turn was requested from another engine that died. If ``restore`` has
                brought it (same previous turn, same given tokens), it is continued, or returned at once if it
                had ended.

        Raises:
            GroupCancelled: The group was cancelled, taken or dropped, or the episode was dropped.
        """
        if episode.group_id in self._ended_groups or episode in self._dropped_episodes:
            raise GroupCancelled
        opened = self._opened(episode.group_id)
        tree = self._tree(opened, episode)
        turn = tree.claim(after, given_ids) if repeated else None
        if turn is None:
            turn = tree.begin(self._engine, after, given_ids)
        await self._engine.sample_turn(
            turn, opened.group, sampling=sampling, max_tokens=max_tokens, seed=seed
        )
        return self._engine.reader.facts(turn)

    def restore(self, group_id: int, turns: Sequence[LoggedTurn]) -> None:
        """Open a group with all turns that another engine had begun; the turns keep their indices.

        A turn that had not ended waits for a repeated ``add_turn``; without one it belongs to no branch.

        Raises:
            GroupCancelled: The group was taken or dropped here.
            ValueError: The group is open here, or ``turns`` belong to another group or have gaps.
        """
        if group_id in self._ended_groups:
            raise GroupCancelled
        if group_id in self._groups:
            raise ValueError(
                f"group_id = {group_id}: is open here already; it can be restored elsewhere only"
            )
        numbers: dict[EpisodeId, int] = {}
        for restored in turns:
            begun = restored.begun
            number = numbers.get(begun.episode, 0)
            if begun.episode.group_id != group_id or begun.number != number:
                raise ValueError(
                    f"turn {begun.number} of {begun.episode}: must be turn {number} of group {group_id}"
                )
            numbers[begun.episode] = number + 1
        opened = self._opened(group_id)
        for restored in turns:
            begun = restored.begun
            tree = self._tree(opened, begun.episode)
            turn = tree.begin(self._engine, begun.after, begun.given_ids)
            turn.restored, turn.is_claimable = restored, True
            tree.episode.num_requests = max(tree.episode.num_requests, restored.num_parts)
            self._engine.log_turn(turn, opened.group)
            if restored.ended is not None:
                turn.stop = () if restored.ended.stop_text is None else (restored.ended.stop_text,)
                self._engine.resume_turn(turn, opened.group, max_tokens=restored.num_tokens)

    def _opened(self, group_id: int) -> _OpenGroup:
        if group_id not in self._groups:
            group = self._engine.open_group(group_id if group_id >= 0 else None)
            self._groups[group_id] = _OpenGroup(group=group)
        return self._groups[group_id]

    def _tree(self, opened: _OpenGroup, episode: EpisodeId) -> _OpenEpisode:
        if episode not in opened.episodes:
            new = self._engine.new_episode(episode.index, agent=episode.agent, attempt=episode.attempt)
            opened.episodes[episode] = _OpenEpisode(episode=new)
        return opened.episodes[episode]

    async def take(self, group_id: int, episodes: Sequence[EpisodeId]) -> tuple[tuple[Rollout, ...], ...]:
        """Return the branches of the given episodes of a group as rollouts, and close the group.

        Its turns stay logged until the engine forgets the group. An episode without a turn has no branch. If
        an environment returned without waiting for a turn, that turn is ended and belongs to no branch.
        """
        self._end(group_id)
        opened = self._groups.pop(group_id)
        for tree in opened.episodes.values():
            if any(turn.end is None for turn in tree.turns):
                await self._engine.cancel_episode(tree.episode)
        self._engine.close_group(opened.group)
        return tuple(
            self._engine.reader.rollouts(_finished(opened.episodes[episode]))
            if episode in opened.episodes
            else ()
            for episode in episodes
        )

    async def drop(self, group_id: int) -> None:
        """Cancel everything in flight for a group and forget it."""
        self._end(group_id)
        opened = self._groups.pop(group_id, None)
        if opened is not None:
            await self._engine.cancel([opened.group.key])
            self._engine.close_group(opened.group)
            self._engine.forget_group(opened.group.key)

    async def drop_episode(self, episode: EpisodeId) -> None:
        """Cancel everything in flight for one attempt at an episode and forget it; its group stays open."""
        self._dropped_episodes.add(episode)
        opened = self._groups.get(episode.group_id)
        if opened is not None and (tree := opened.episodes.pop(episode, None)) is not None:
            await self._engine.cancel_episode(tree.episode)
            self._engine.forget_turns(tree.turns)

    def _end(self, group_id: int) -> None:
        self._ended_groups[group_id] = None
        while len(self._ended_groups) > MAX_ENDED_GROUPS:
            self._ended_groups.popitem(last=False)


def _finished(opened: _OpenEpisode) -> list[EngineTurn]:
    return [turn for turn in opened.turns if turn.end is not None]
