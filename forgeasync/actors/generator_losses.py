"""What a run has lost with generators, and what has been made up for."""

from dataclasses import dataclass, field

from forgeasync.actors.replica import LiveReplica
from forgeasync.faults import Fault, FaultLog
from forgeasync.generator import EngineStats
from forgeasync.rollouts import InFlightRead


@dataclass(slots=True)
class GeneratorLosses:
    """Counts of generators that are gone, and losses that nothing has made up for yet."""

    faults: FaultLog
    num_tokens_kept: int = 0
    """Of what lost generators had in flight: those that others continue from."""
    num_tokens_lost: int = 0
    """The others that were logged."""
    _num_generated_tokens: int = 0
    _busy_s: float = 0.0
    _open: dict[int, list[Fault]] = field(default_factory=dict)
    """Faults by rank."""

    def count(self, replica: LiveReplica) -> None:
        """Keep what a generator that is gone had counted when it was last heard of."""
        self._num_generated_tokens += replica.stats.num_generated_tokens
        self._busy_s += replica.stats.busy_s

    def read(self, left: InFlightRead) -> None:
        """Count what a lost generator had in flight."""
        self.num_tokens_kept += left.num_kept
        self.num_tokens_lost += left.num_lost

    def wait_for(self, rank: int, fault: Fault) -> None:
        """A loss is made up for when the rank has a healthy generator."""
        self._open.setdefault(rank, []).append(fault)

    def heal(self, replica: LiveReplica) -> bool:
        """A rank has a healthy generator; whether that makes up for a loss."""
        faults = self._open.pop(replica.rank, [])
        for fault in faults:
            self.faults.recovered(fault, f"was replaced by process {replica.pid}")
        return bool(faults)

    @property
    def stats(self) -> EngineStats:
        """What all generators that are gone had counted."""
        return EngineStats(num_generated_tokens=self._num_generated_tokens, busy_s=self._busy_s)

    @property
    def tokens_kept_share(self) -> float:
        """Share of the tokens in flight that others continue from; 1 where none was lost."""
        num_tokens = self.num_tokens_kept + self.num_tokens_lost
        return self.num_tokens_kept / num_tokens if num_tokens else 1.0
