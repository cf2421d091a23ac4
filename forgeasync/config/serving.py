"""The section on how people are served: where, with which bounds, and where scores come from.

The plug-in ``serve`` has the data source and the environment of such runs.
"""

import ipaddress
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.schema import Count, Seconds, Section


class ScoreSource(StrEnum):
    """What gives a session its score."""

    FEEDBACK = "feedback"
    """The last feedback that was posted."""
    ENVIRONMENT = "environment"
    """``verdict`` of your own environment, which is derived from ``ServedSessions``."""
    JUDGE = "judge"
    """``agents.judge``, which reads every reply together with what the person wrote next."""


class ServingSection(Section):
    """How people are served; used with ``data.source: {kind: served}``."""

    host: str = "127.0.0.1"
    """Address to listen on. Everything but this machine's own (127.0.0.1, ::1, localhost) needs
    ``token_env``."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any that is free. The console and serving.json in the run's folder say which; a worker that is
    replaced comes back on the same one."""
    public_host: str | None = None
    """Name or address by which clients reach the machine; null: ``host``."""
    token_env: str | None = None
    """Name of an environment variable with the token for ``POST /sessions``, at least 16 characters. null: a
    random token, which is written to serving.json (readable for its owner only)."""
    idle_session_s: Seconds = 900.0
    """A session without a turn for this long is ended."""
    session_s: Seconds = 7200.0
    """A session that is older than this is ended."""
    max_open_sessions: Count = 256
    """Most sessions that are open; one more gets 429."""
    max_turns_at_once: int = Field(default=4, gt=0, le=1024)
    """Most turns of one session that are sampled at the same time; one more gets 429."""
    score_from: tuple[ScoreSource, ...] = (ScoreSource.FEEDBACK,)
    """Where a session's score comes from: the first of these that gives one. A session without any is not
    trained on."""
    keep_texts: bool = False
    """Write what people and the model said to rollouts.jsonl. false: rollouts.jsonl has numbers only."""

    @model_validator(mode="after")
    def _has_different_sources(self) -> Self:
        if not self.score_from or len(set(self.score_from)) < len(self.score_from):
            raise PydanticCustomError(
                "key_of_section",
                "is {given}; must be one or more of {all}, each once",
                {
                    "key": "score_from",
                    "given": ", ".join(self.score_from) or "empty",
                    "all": ", ".join(ScoreSource),
                },
            )
        return self


WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine."""


def is_loopback(host: str) -> bool:
    """Return whether nobody but this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
