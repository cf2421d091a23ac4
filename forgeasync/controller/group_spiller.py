"""Keeps finished groups on the disk, for a run that is resumed after its controller was killed.

A group is written by a thread of the host that has its arrays, one group at a time, and removed when it is
dropped or a whole checkpoint has the step that trained on it. What cannot be written is counted and told:
if the run is killed, these groups are sampled again.
"""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forgeasync.actors import GeneratorRouter
from forgeasync.checkpoint import checkpoint_bytes, export_bytes, list_checkpoints, step_of
from forgeasync.controller.preparation import Prepared
from forgeasync.rollouts import Group, Score, SpilledGroup, encode_facts, file_name


class GroupSpiller:
    """The files of the groups that have not trained, or whose steps no checkpoint has."""

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        *,
        checkpoints: Path,
        generators: GeneratorRouter,
        tell: Callable[[str], None],
    ) -> None:
        """Write into ``folder``; ``checkpoints`` is where those of the run are."""
        config = prepared.config
        self._folder = folder
        self._checkpoints = checkpoints
        self._generators = generators
        self._tell = tell
        self._is_on = config.buffer.keep_groups
        self._has_checkpoints = config.checkpoint.every_steps is not None
        # A disk that these files have filled would never again take the checkpoint that lets them go.
        self._reserved_bytes = export_bytes(config, prepared.facts)
        if self._has_checkpoints:
            self._reserved_bytes += checkpoint_bytes(config, prepared.facts)
        self._waiting: dict[int, tuple[SpilledGroup, float]] = {}
        """Groups to be written, and the one that is being written, with the time at which they came."""
        self._files: dict[int, Path] = {}
        self._trained: deque[tuple[int, tuple[int, ...]]] = deque()
        """Steps whose groups are on the disk."""
        self._obsolete: set[int] = set()
        self._changed = asyncio.Event()
        self._is_refused = False
        self._num_left_out = 0 if prepared.resumed is None else prepared.resumed.found.num_left_out
        self._num_unkept = 0
        self._longest_behind_s = 0.0

    def keep(
        self, group: Group, rewards: Sequence[float], kept: Sequence[int], scores: Sequence[Score]
    ) -> None:
        """Write a group that was scored: the rollouts at ``kept`` train."""
        if self._is_on:
            one = SpilledGroup(group=group, rewards=tuple(rewards), kept=tuple(kept), scores=tuple(scores))
            self._waiting[group.group_id] = one, time.monotonic()
            self._changed.set()

    def restored(self, group: Group) -> None:
        """Take over the file of a group from before the run was resumed."""
        self._files[group.group_id] = self._folder / file_name(group.draw_id)

    def trained(self, step: int, groups: Iterable[Group]) -> None:
        """A step was made: its groups stay until a checkpoint has it."""
        ids = tuple(group.group_id for group in groups)
        if not self._has_checkpoints:
            self.forget(ids)
        elif any(one in self._files or one in self._waiting for one in ids):
            self._trained.append((step, ids))
            self._changed.set()

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups need no file any more."""
        self._obsolete.update(group_ids)
        self._changed.set()

    async def loop(self) -> None:
        """Write and remove files beside the run."""
        if self._is_on:
            self._folder.mkdir(exist_ok=True)
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._remove_obsolete()
            if self._waiting:
                await self._write_first()
                self._changed.set()

    async def end(self) -> None:
        """The run has made all its steps: no group is needed any more."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _write_first(self) -> None:
        group_id, (kept, since_s) = next(iter(self._waiting.items()))
        target = self._folder / file_name(kept.group.draw_id)
        problem = await self._write(kept, target)
        del self._waiting[group_id]
        self._longest_behind_s = max(self._longest_behind_s, time.monotonic() - since_s)
        if problem is None:
            self._files[group_id] = target
        else:
            self._num_unkept += 1
        if (problem is not None) != self._is_refused:
            self._is_refused = problem is not None
            self._tell(
                "finished groups are kept on the disk again"
                if problem is None
                else f"warning: finished groups cannot be kept on the disk ({problem}); if the run is "
                "killed, these are sampled again"
            )

    async def _write(self, kept: SpilledGroup, target: Path) -> str | None:
        """Write a group; what prevents it, in words."""
        num_bytes = kept.group.num_payload_bytes
        free = (await asyncio.to_thread(shutil.disk_usage, self._folder)).free
        if free < num_bytes + self._reserved_bytes:
            return (
                f"{self._folder} has {free:,} bytes left, and the next checkpoint and the trained model take "
                f"{self._reserved_bytes:,}"
            )
        ref = kept.group.rollouts[0].branches[0].response
        host = next((host for host in self._generators.pool.hosts if host.id == ref.host_id), None)
        if host is None:
            return f"host {ref.host_id}, which has its arrays, is gone"
        return await host.keep_group(target, encode_facts(kept), ref.file)

    async def _remove_obsolete(self) -> None:
        if self._trained:
            found = await asyncio.to_thread(list_checkpoints, self._checkpoints)
            newest = max((step_of(folder) or 0 for folder in found), default=0)
            while self._trained and self._trained[0][0] <= newest:
                self._obsolete.update(self._trained.popleft()[1])
        for group_id in self._obsolete:
            self._waiting.pop(group_id, None)
        files = [file for one in self._obsolete if (file := self._files.pop(one, None)) is not None]
        self._obsolete.clear()
        await asyncio.to_thread(_unlink, files)

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl; delays are those since the last call."""
        longest_s, self._longest_behind_s = self._longest_behind_s, 0.0
        return {
            "buffer/num_kept_groups": len(self._files),
            "buffer/num_unkept_groups": self._num_unkept,
            "buffer/num_left_out_groups": self._num_left_out,
            "buffer/kept_behind_s": longest_s,
        }


def _unlink(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
