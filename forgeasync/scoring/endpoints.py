"""Requests to OpenAI-compatible endpoints: bounded replies, kinds of failures, and a circuit breaker.

``CircuitBreaker`` is pure. It decides whether a request may be made:

    closed ──`MAX_FAILURES` in a row─► open ──after a wait──► half open ──success──► closed
                                          ▲                        │
                                          └─────── failure ────────┘ the wait doubles

While it is open no request is made, so an endpoint that is down is not flooded. While it is half open, one
call tests the endpoint.
"""

from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import openai

from forgeasync.config import JudgeReward, TeacherEndpoint
from forgeasync.environments import EndpointModel, open_client


class RewardUnavailable(Exception):
    """The reward cannot score at the moment: a server is down, or its rate limit is reached.

    This is not a property of the response. No attempt is counted; the response is scored later.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is the number of seconds after which a retry makes sense."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.reason


MAX_FAILURES = 4
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 15.0


class CircuitBreaker:
    """Circuit breaker of an endpoint. Times are in seconds of one clock, which the caller reads."""

    def __init__(self) -> None:
        """Start closed."""
        self._in_a_row = 0
        self._wait_s = 0.0
        self._open_until_s: float | None = None
        self._is_probing = False

    def begin(self, now_s: float) -> float | None:
        """Return None if a call may begin, otherwise the seconds after which a retry makes sense.

        After None, the caller must call ``succeeded``, ``failed`` or ``abandoned``.
        """
        if self._open_until_s is None:
            return None
        if now_s < self._open_until_s:
            return self._open_until_s - now_s
        if self._is_probing:
            return FIRST_WAIT_S
        self._is_probing = True
        return None

    def succeeded(self) -> None:
        """Record that the endpoint has answered."""
        self._in_a_row, self._open_until_s, self._is_probing, self._wait_s = 0, None, False, 0.0

    def failed(self, now_s: float, *, retry_after_s: float = 0.0) -> None:
        """Record that the endpoint did not answer or is unavailable, with its Retry-After if it gave one."""
        self._in_a_row += 1
        if self._open_until_s is None and self._in_a_row < MAX_FAILURES and not retry_after_s:
            return
        if self._open_until_s is None or self._is_probing:
            self._wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2.0 * self._wait_s))
        self._is_probing = False
        until_s = now_s + max(self._wait_s, retry_after_s)
        self._open_until_s = max(until_s, self._open_until_s or until_s)

    def abandoned(self) -> None:
        """Record that a call was cancelled, which says nothing about the endpoint."""
        self._is_probing = False


MAX_RETRY_AFTER_S = 300.0
"""Upper bound of an accepted Retry-After, in seconds."""


class EndpointDown(Exception):
    """The endpoint has not answered, or is temporarily unavailable. This is not a property of the request."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is the endpoint's Retry-After; 0 if there is none."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EndpointRefuses(Exception):
    """The endpoint has refused the request: a wrong key, model or URL, or an unsupported request."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status


class ReplyTooLong(Exception):
    """The reply exceeds the limit of bytes."""


class EndpointClient:
    """Client of the endpoint that a section names; for one event loop."""

    def __init__(self, section: JudgeReward | TeacherEndpoint) -> None:
        """Read the key, without connecting.

        Raises:
            ValueError: The environment variable with the key is not set.
        """
        endpoint = EndpointModel(
            base_url=section.base_url,
            model=section.model,
            api_key_variable=section.api_key_env,
            max_retries=0,
        )
        self._limit_s = section.limit_s
        self.sdk = open_client(endpoint, limit_s=section.limit_s)
        """SDK client, configured without retries."""

    async def read(self, reply: AbstractAsyncContextManager[Any], *, max_bytes: int) -> bytes:
        """Make a request and read its body; ``reply`` is a ``with_streaming_response`` call of the SDK.

        Raises:
            EndpointDown: There was no answer within ``limit_s``, or one with status 408, 409, 429 or 5xx.
            EndpointRefuses: The answer has another error status.
            ReplyTooLong: The body has more than ``max_bytes``.
        """
        body = bytearray()
        try:
            async with reply as response:
                async for part in response.iter_bytes():
                    body += part
                    if len(body) > max_bytes:
                        raise ReplyTooLong
        except openai.APIStatusError as error:
            reason = f"status {error.status_code}: {' '.join(error.message.split())[:300]}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                wait_s = retry_after_s(error.response.headers.get("retry-after"))
                raise EndpointDown(reason, wait_s) from None
            raise EndpointRefuses(reason, error.status_code) from None
        except openai.APITimeoutError:
            raise EndpointDown(f"no answer within limit_s = {self._limit_s:g} s", 0.0) from None
        except openai.APIConnectionError as error:
            raise EndpointDown(f"no connection: {error.__cause__ or error}", 0.0) from None
        return bytes(body)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.sdk.close()


def retry_after_s(header: str | None) -> float:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3); 0 if it is not usable."""
    if header is None or len(header) > 100:
        return 0.0
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - time()
        except (ValueError, OverflowError):
            return 0.0
    # Also handles nan.
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s > 0.0 else 0.0
