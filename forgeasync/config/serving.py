"""Section ``serving``: address, limits and score sources of a run that serves people.

The plug-in ``serve`` has the data source and the environment of such runs.
"""

import ipaddress
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.schema import Count, Seconds, Section


class ScoreSource(StrEnum):
    """Source of a session's score."""

    FEEDBACK = "feedback"
    """The last feedback that was posted."""
    ENVIRONMENT = "environment"
    """The method ``verdict`` of your own environment, which is derived from ``ServedSessions``."""
    JUDGE = "judge"
    """The agent ``agents.judge``, which reads each reply together with the person's next message."""


class ServingSection(Section):
    """Settings for serving people; used with ``data.source: {kind: served}``."""

    host: str = "127.0.0.1"
    """Address to listen on. All addresses except loopback (127.0.0.1, ::1, localhost) require
    ``token_env``."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any free port. The console and serving.json in the run's folder show it. A worker
    that is replaced uses the same port again."""
    public_host: str | None = None
    """Name or address by which clients reach the machine; null: ``host``."""
    token_env: str | None = None
    """Name of an environment variable with the token for ``POST /sessions``, at least 16 characters. null: a
    random token, which is written to serving.json (readable by its owner only)."""
    idle_session_s: Seconds = 900.0
    """Time without a turn after which a session is ended."""
    session_s: Seconds = 7200.0
    """Age at which a session is ended."""
    max_open_sessions: Count = 256
    """Maximum number of open sessions; requests for more get HTTP status 429."""
    max_turns_at_once: int = Field(default=4, gt=0, le=1024)
    """Maximum number of turns of one session that are sampled at once; requests for more get HTTP status
    429."""
    score_from: tuple[ScoreSource, ...] = (ScoreSource.FEEDBACK,)
    """Sources of a session's score, in order of priority: the first one that gives a score counts. A session
    without a score is not trained on."""
    keep_texts: bool = False
    """Write the messages of people and the model to rollouts.jsonl. false: rollouts.jsonl has numbers
    only."""

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
"""Values of ``host`` that mean all addresses of a machine."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
