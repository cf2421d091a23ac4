"""Whole episodes of the groups that have not trained yet, for rollouts.jsonl.

They stay here, in the controller, from the end of a group's last episode until the group trains or is lost:
their texts would make the buffer's messages large, and most of them are never written.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forgeasync.rollouts import EpisodeOutcome, record_of

MAX_EPISODES = 4096
"""Most episodes whose records are held; one has at most 500,000 bytes of messages."""

EpisodeKey = tuple[int, int]
"""Id of a group and place of an episode in it."""


class EpisodeRecords:
    """Records of live groups, and the files that their episodes have kept."""

    def __init__(self, artifacts: Path, *, max_episodes: int = MAX_EPISODES) -> None:
        """``artifacts`` is the folder with the files of all episodes; it need not exist."""
        self._artifacts = artifacts
        self._max_episodes = max_episodes
        self._of_group: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._num_episodes = 0
        self._num_dropped = 0
        # Deleting files would hold the controller's event loop up.
        self._deleting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="artifacts")

    def add(self, group_id: int, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Keep the records of a group, given all attempts at its episodes in order."""
        attempts: dict[int, list[EpisodeOutcome]] = {}
        for outcome in outcomes:
            attempts.setdefault(outcome.episode, []).append(outcome)
        kept: dict[int, Mapping[str, Any]] = {}
        for episode, of_episode in attempts.items():
            if (record := record_of(of_episode)) is None:
                continue
            if self._num_episodes >= self._max_episodes:
                self._num_dropped += 1
                continue
            kept[episode] = record
            self._num_episodes += 1
        self._of_group[group_id] = kept

    def of(self, group_id: int, episode: int) -> Mapping[str, Any] | None:
        """Return the record of an episode, if it is here."""
        return self._of_group.get(group_id, {}).get(episode)

    def forget(self, group_ids: Iterable[int], *, written: Collection[EpisodeKey] = ()) -> None:
        """Forget groups that have trained or are lost. Files stay only of the episodes in ``written``."""
        ids = frozenset(group_ids)
        for group_id in ids:
            self._num_episodes -= len(self._of_group.pop(group_id, {}))
        if ids:
            self._deleting.submit(_delete, self._artifacts, ids, frozenset(written))

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl."""
        return {
            "episode/num_held_records": self._num_episodes,
            "episode/num_dropped_records": self._num_dropped,
        }

    def close(self) -> None:
        """Wait until what is to be deleted is; a second call does nothing."""
        self._deleting.shutdown()


def _delete(artifacts: Path, group_ids: Collection[int], written: Collection[EpisodeKey]) -> None:
    if not artifacts.is_dir():
        return
    for folder in artifacts.iterdir():
        group, _, rest = folder.name.partition("-")
        episode = rest.partition("-")[0]
        if not (group.isdecimal() and episode.isdecimal()):
            continue
        key = int(group), int(episode)
        if key[0] in group_ids and key not in written:
            # An episode that has been given up may still write there.
            shutil.rmtree(folder, ignore_errors=True)
