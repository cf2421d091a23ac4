"""A teacher whose weights are versions of the policy: its engines take them as generators do."""

from dataclasses import dataclass

from forgeasync.actors.host_updates import SwappedReplica
from forgeasync.actors.router import GeneratorRouter
from forgeasync.config import AveragedPolicy, TeacherSource
from forgeasync.weights import WeightSet

ITS_HOST = 0
"""All engines of a teacher are on the controller's machine."""


@dataclass(slots=True, kw_only=True)
class MovingTeacher:
    """The engines of one teacher as a reader of published weights."""

    name: str
    source: TeacherSource
    router: GeneratorRouter
    num_updates: int = 0
    """Versions that an engine has swapped in, added up over engines."""
    num_rescored: int = 0
    """Scores that a swap has cut, and that were computed anew under the new weights."""

    @property
    def weights(self) -> WeightSet:
        """Which weights of a version it takes."""
        return WeightSet.AVERAGE if isinstance(self.source, AveragedPolicy) else WeightSet.POLICY

    @property
    def wanted(self) -> int:
        """The newest version that its engines are to have."""
        return self.router.pool.table.state.newest

    def published(self, version: int) -> None:
        """A version can be fetched; the engines are to have it if it is due."""
        if self.source.is_due(version, newest=self.wanted):
            self.router.published(version)

    async def until_current(self, version: int) -> None:
        """Wait until healthy engines have what is due at ``version``."""
        await self.router.pool.table.until(
            lambda table: table.has_healthy and not self.source.is_due(version, newest=table.served)
        )

    def taken(self, swapped: SwappedReplica) -> None:
        """Count an engine as one that scores under the version that it has swapped in."""
        self.num_updates += 1
        self.num_rescored += swapped.report.num_recomputed
        self.router.taken(swapped.number)
