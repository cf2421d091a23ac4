"""Serving people: the address and the token of a run, and the protocol that opens their sessions.

The plug-in ``serve`` implements the protocol. Address and token stay the same if a worker is replaced.
"""

import errno
import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from forgeasync.config import ServingSection
from forgeasync.environments.agent import EpisodeAgent, TurnRequest
from forgeasync.environments.sessions.server import MIN_TOKEN_CHARS, SessionServer
from forgeasync.environments.sessions.session import Session
from forgeasync.rollouts import SampledTurn
from forgeasync.schema import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """Settings with which a worker serves people."""

    section: ServingSection
    port: int
    """Port to listen on; 0 for any free port."""
    token: str = field(repr=False)


class ServingAddress:
    """The run's address for people, and the file in which clients find it. Used by the controller."""

    def __init__(self, section: ServingSection, file: Path, tell: Callable[[str], None]) -> None:
        """``tell`` is called with a line for people.

        Raises:
            ValueError: The environment variable of the token is not set or too short.
        """
        self._section = section
        self._file = file
        self._tell = tell
        self._port = section.port
        self._token = (
            secrets.token_urlsafe(32) if section.token_env is None else read_token(section.token_env)
        )

    def setup(self) -> ServingSetup:
        """Return the set-up of the next worker."""
        return ServingSetup(section=self._section, port=self._port, token=self._token)

    def opened(self, url: str, port: int) -> None:
        """Store a listening worker's port for later workers. Write the file, readable only by its owner."""
        self._port = port
        token = (
            {"token": self._token}
            if self._section.token_env is None
            else {"token_env": self._section.token_env}
        )
        text = json.dumps({"url": url, **token}, indent=1) + "\n"
        new = self._file.with_name(f".{self._file.name}.new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(self._file)
        whose = "its token is in" if self._section.token_env is None else "the address is in"
        self._tell(f"serving people: POST {url}/sessions; {whose} {self._file}")


def read_token(variable: str) -> str:
    """Return the token in an environment variable.

    Raises:
        ValueError: It is not set, too short, or not ASCII.
    """
    token = os.environ.get(variable, "")
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        what = f"has {len(token)} characters" if token else "is not set"
        raise ValueError(
            f"environment variable {variable} {what}; must hold a token of at least {MIN_TOKEN_CHARS} ASCII "
            "characters"
        )
    return token


def check_address(section: ServingSection) -> Iterator[Problem]:
    """Check the token, and that a server can listen on the address."""
    if section.token_env is not None:
        try:
            read_token(section.token_env)
        except ValueError as error:
            yield Problem(field="serving.token_env", value=section.token_env, remedy=str(error))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            section.host or None, section.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        what = "a free port, or 0 for any" if is_port else "an address of this machine"
        yield Problem(
            field="serving.port" if is_port else "serving.host",
            value=section.port if is_port else section.host,
            remedy=f"cannot be listened on ({error.strerror}); must be {what}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """Counts and current values of one worker's sessions with people."""

    counts: Mapping[str, float]
    """Counts and sums since the worker started, by name."""
    num_open: int
    """Open sessions, including those that are not trained on."""
    num_on_offer: int
    """Episodes that wait for a client."""
    turn_p50_s: float | None
    """Median time from a request for a turn to the turn's end, over the last turns; None before any turn."""
    turn_p99_s: float | None


def serving_metrics(lost: Mapping[str, float], last: ServingReport | None) -> dict[str, float]:
    """Return metrics under their names in metrics.jsonl.

    ``lost`` are the counts of workers that are gone. ``last`` is the report of the current worker, or None.
    """
    counts = Counter(lost)
    if last is not None:
        counts.update(last.counts)
    feedback_sum = counts.pop("feedback_sum", 0)
    metrics: dict[str, float] = {f"serving/{name}": number for name, number in counts.items()}
    if counts["num_feedback"]:
        metrics["serving/feedback_mean"] = feedback_sum / counts["num_feedback"]
    metrics["serving/num_open"] = 0 if last is None else last.num_open
    metrics["serving/num_on_offer"] = 0 if last is None else last.num_on_offer
    if last is not None and last.turn_p50_s is not None and last.turn_p99_s is not None:
        metrics |= {"serving/turn_p50_s": last.turn_p50_s, "serving/turn_p99_s": last.turn_p99_s}
    return metrics


class SessionService(Protocol):
    """Serves people in one worker; used on the worker's event loop."""

    @property
    def server(self) -> SessionServer:
        """The server of its sessions; the worker enters it."""
        ...

    def connect(self, untrained_agent: Callable[[], EpisodeAgent]) -> None:
        """Set the function that creates agents for sessions without an episode."""
        ...

    def open_for(self, agent: EpisodeAgent) -> Session:
        """Open the session of an agent whose episode has a client."""
        ...

    def end(self) -> None:
        """Close all sessions at the end of the run, and open no further ones."""
        ...

    def report(self) -> ServingReport:
        """Return counts and current values."""
        ...


@runtime_checkable
class ServesPeople(Protocol):
    """An environment whose tasks are people (``Environment.serves_people``)."""

    def open_service(self, setup: ServingSetup) -> SessionService:
        """Return this worker's service; called once, before the first episode."""
        ...


SampleAfter = Callable[[np.ndarray, int, tuple[str, ...]], Awaitable[SampledTurn]]
"""Samples after a prompt (token ids, int32), up to a number of tokens or to one of the stop texts.

No generator stores the turn, so its number means nothing.
"""


class UntrainedTurns:
    """Samples the turns of one agent that is not trained on (a ``SampleTurn``), on one event loop.

    Generators store nothing between turns: the prompt of each request is the whole path, which their prefix
    caches may hold. Therefore these sessions reserve no payload, and a worker that dies leaves nothing
    behind. This object keeps the token ids of all paths until the session ends.
    """

    def __init__(self, sample: SampleAfter) -> None:
        self._sample = sample
        self._paths: list[np.ndarray] = []

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        """Sample a turn."""
        before = np.zeros(0, np.int32) if request.after is None else self._paths[request.after]
        prompt_ids = np.concatenate([before, request.given_ids])
        turn = await self._sample(prompt_ids, request.max_tokens, request.stop)
        self._paths.append(np.concatenate([prompt_ids, turn.ids_T]))
        return replace(turn, turn=len(self._paths) - 1)
