"""How sessions end, and what their clients are told of it."""

from enum import StrEnum


class SessionEnd(StrEnum):
    """How a session ended."""

    FEEDBACK = "feedback"
    """Feedback ended it."""
    CLOSED = "closed"
    """Its client closed it, or its episode ended."""
    IDLE = "idle"
    """It had no turn for ``serving.idle_session_s``."""
    TIME = "time"
    """It was open for ``serving.session_s``."""
    RUN_OVER = "run_over"
    """The run has ended."""

    @property
    def words(self) -> str:
        """What a client is told that asks for another turn."""
        why = {
            SessionEnd.FEEDBACK: "feedback has ended it",
            SessionEnd.CLOSED: "it was closed",
            SessionEnd.IDLE: "it had no turn for too long (serving.idle_session_s)",
            SessionEnd.TIME: "it was open for too long (serving.session_s)",
            SessionEnd.RUN_OVER: "the run that served it has ended",
        }[self]
        return f"this session is closed: no further turn is sampled in it, because {why}"
