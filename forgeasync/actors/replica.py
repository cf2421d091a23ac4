"""One generator of a run as the controller holds it: its actor, its process, and whether it is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgeasync.actors.deaths import Proc
from forgeasync.actors.generator import GeneratorActor
from forgeasync.faults import Role
from forgeasync.generator import EngineStats
from forgeasync.launch import Host
from forgeasync.rollouts import InFlightRead
from forgeasync.waiting import forget

T = TypeVar("T")

SEEN_S = 20.0
"""Time for a process to be seen to be gone after a call to it has failed: heartbeats may have to tell."""


class ReplicaLost(RuntimeError):
    """A generator is gone, with what it was sampling."""


@dataclass(slots=True, kw_only=True)
class SpawnedReplica:
    """A generator whose engine is loaded."""

    actor: GeneratorActor
    pid: int
    host: Host
    stop: Callable[[], Awaitable[None]]
    """Give back what Monarch holds of its proc, which was killed."""
    in_flight: Path | None = None
    """Folder on its host where it logs its tokens in flight; None: it does not."""


@dataclass(slots=True, kw_only=True)
class LiveReplica:
    """A generator that has not been lost, or had not been when it was chosen."""

    number: int
    """Its own: a generator that replaces it has another."""
    rank: int
    actor: GeneratorActor
    pid: int
    host: Host
    stop: Callable[[], Awaitable[None]]
    in_flight: Path | None = None
    groups: set[int] = field(default_factory=set)
    """Groups that it is sampling."""
    left: "asyncio.Future[InFlightRead]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What it had of its groups, some time after it was lost."""
    role: Role = Role.GENERATOR
    title: str = "generator"
    """What it is called in messages."""
    give_up: "Callable[[LiveReplica, str], None]"
    """Have it killed and replaced; the words say what is wrong with it, as the rest of a sentence."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    beat_since_s: float
    """When the heartbeat under way was sent, or the next one is due."""
    beat: "asyncio.Task[EngineStats] | None" = None
    stats: EngineStats = field(default_factory=lambda: EngineStats(num_generated_tokens=0, busy_s=0.0))
    """What it had counted when it was last heard of."""

    @property
    def name(self) -> str:
        return f"{self.title} {self.rank} (process {self.pid})"

    def proc(self) -> Proc:
        return Proc(role=self.role.value, rank=self.rank, pid=self.pid, host=self.host)

    async def while_there(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call to this generator, and wait for its answer or its end.

        Raises:
            ReplicaLost: it is gone, or became so meanwhile, or its engine has died.
        """
        if self.gone.is_set():
            # A message to a process that is gone comes back as an error of this one.
            raise ReplicaLost(f"{self.name} is gone")
        answer = asyncio.ensure_future(call())
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not answer.cancelled() and may_be_a_death(answer.exception()):
                # The call of one that dies can fail before its process is seen to be gone.
                has_ended = gone.done() or await self.proc().has_ended()
                if is_engine_dead(answer.exception()):
                    self.give_up(self, "has an engine that has died")
                elif has_ended or not isinstance(answer.exception(), ActorError):
                    await asyncio.wait([gone], timeout=SEEN_S)
            if self.gone.is_set():
                raise ReplicaLost(f"{self.name} is gone")
            return answer.result()
        finally:
            gone.cancel()
            answer.add_done_callback(forget)
            answer.cancel()


def may_be_a_death(error: BaseException | None) -> bool:
    """Whether a call may have failed because the process that was called is dying."""
    return isinstance(error, ActorError | SupervisionError)


def is_engine_dead(error: BaseException | None) -> bool:
    """Whether an engine has died whose process lives."""
    # By its name: importing vLLM (0.32, vllm/v1/engine/exceptions.py) takes the controller 10 s.
    return isinstance(error, ActorError) and type(error.exception).__name__ == "EngineDeadError"
