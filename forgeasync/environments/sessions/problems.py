"""What a session refuses or fails to do, with the status that says so in HTTP."""

import logging

from forgeasync.environments.agent import EpisodeOver
from forgeasync.environments.environment import ContextFull, TooManyTurns
from forgeasync.environments.sessions.session_end import SessionEnd

_LOGGER = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        may_retry: bool = True,
    ) -> None:
        """``param`` is the field that is wrong. A client library that retries by itself does so for statuses
        408, 409, 429 and from 500 on, unless ``may_retry`` is false."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.may_retry = may_retry

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, beside those of its content."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        # openai 3.52 and anthropic 2.11, _base_client.py, _should_retry: the server's word counts first.
        return headers if self.may_retry else {**headers, "x-should-retry": "false"}


def closed(end: SessionEnd) -> RequestError:
    """The session has ended."""
    return RequestError(
        end.words,
        status=410,
        code="session_closed",
        may_retry=False,
    )


def as_request_error(error: BaseException) -> RequestError:
    """Return what to tell a client of an exception that answering it has raised; logs what is ours alone."""
    match error:
        case RequestError():
            return error
        case ContextFull():
            return RequestError(str(error), param="messages", code="context_length_exceeded")
        case TooManyTurns():
            return RequestError(str(error), status=410, code="too_many_turns", may_retry=False)
        case EpisodeOver():
            return closed(SessionEnd.CLOSED)
        case ValueError():
            return RequestError(str(error), param="messages", code="invalid_messages")
    _LOGGER.error("a request to a session failed", exc_info=error)
    return RequestError("the server failed to answer; its log says why", status=500, code="server_error")
