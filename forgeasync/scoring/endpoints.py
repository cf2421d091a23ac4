"""Requests to OpenAI-compatible endpoints: bounded replies, what a failure means, and whether to ask again.

A ``Breaker`` is pure. It says whether an endpoint is worth asking:

    closed ──`num_failures` in a row──► open ──after a wait──► half open ──success──► closed
                                          ▲                        │
                                          └─────── failure ────────┘ the wait doubles

While it is open nothing is asked, so an endpoint that is down gets no storm of requests. Half open, one call
finds out for all."""

from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import openai

from forgeasync.environments import EndpointModel


class RewardUnavailable(Exception):
    """A reward cannot score now: a server is down, or its limit of requests is used up.

    It says nothing of the response. No attempt is counted; the response is scored later.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is when it is worth trying again, in seconds from now."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.reason


FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 15.0


class Breaker:
    """Times are in seconds of one clock, which the caller reads."""

    def __init__(
        self,
        *,
        num_failures: int = 4,
        first_wait_s: float = FIRST_WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        """Closed. Raises ValueError where a number is not above 0 or the waits are the wrong way round."""
        if num_failures < 1 or not 0.0 < first_wait_s <= longest_wait_s:
            raise ValueError(
                f"Breaker: num_failures = {num_failures} must be at least 1, and 0 < first_wait_s = "
                f"{first_wait_s} <= longest_wait_s = {longest_wait_s}"
            )
        self._num_failures = num_failures
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._in_a_row = 0
        self._wait_s = 0.0
        self._open_until_s: float | None = None
        self._is_probing = False

    @property
    def is_closed(self) -> bool:
        """Whether calls pass freely."""
        return self._open_until_s is None

    def begin(self, now_s: float) -> float | None:
        """None: the call may begin, and ``succeeded`` or ``failed`` or ``abandoned`` has to follow. Else the
        seconds after which it is worth asking again."""
        if self._open_until_s is None:
            return None
        if now_s < self._open_until_s:
            return self._open_until_s - now_s
        if self._is_probing:
            return self._first_wait_s
        self._is_probing = True
        return None

    def succeeded(self) -> None:
        """The endpoint has answered."""
        self._in_a_row, self._open_until_s, self._is_probing, self._wait_s = 0, None, False, 0.0

    def failed(self, now_s: float, *, retry_after_s: float = 0.0) -> None:
        """The endpoint has not answered, or says that it cannot; it may say how long."""
        self._in_a_row += 1
        if self._open_until_s is None and self._in_a_row < self._num_failures and not retry_after_s:
            return
        if self._open_until_s is None or self._is_probing:
            self._wait_s = min(self._longest_wait_s, max(self._first_wait_s, 2.0 * self._wait_s))
        self._is_probing = False
        until_s = now_s + max(self._wait_s, retry_after_s)
        self._open_until_s = max(until_s, self._open_until_s or until_s)

    def abandoned(self) -> None:
        """A call that had begun was cancelled: nothing is known."""
        self._is_probing = False


MAX_RETRY_AFTER_S = 300.0
"""More is not believed of a Retry-After."""


class EndpointDown(Exception):
    """The endpoint has not answered, or says that it cannot now. It says nothing of what was asked."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is what the endpoint asks for; 0 where it asks for nothing."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EndpointRefuses(Exception):
    """The endpoint has refused the request itself: a wrong key, model or URL, or a request it cannot take."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status


class ReplyTooLong(Exception):
    """The reply has more bytes than are read."""


class EndpointClient:
    """One endpoint; for one event loop."""

    def __init__(self, *, base_url: str, model: str, api_key_env: str | None, limit_s: float) -> None:
        """Connect to nothing. Raises ValueError where the variable with the key is not set."""
        key = EndpointModel(base_url=base_url, model=model, api_key_variable=api_key_env).api_key()
        self._limit_s = limit_s
        self.sdk = openai.AsyncOpenAI(base_url=base_url, api_key=key, timeout=limit_s, max_retries=0)
        """The SDK, which repeats nothing by itself."""

    async def read(self, reply: AbstractAsyncContextManager[Any], *, max_bytes: int) -> bytes:
        """Make a request and read its body; ``reply`` is a ``with_streaming_response`` call of the SDK.

        Raises:
            EndpointDown: there was no answer within ``limit_s``, or one with status 408, 409, 429 or 5xx.
            EndpointRefuses: another status.
            ReplyTooLong: the body has more than ``max_bytes``.
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

    async def close(self) -> None:
        """Close the connections."""
        await self.sdk.close()


def retry_after_s(header: str | None) -> float:
    """Return the seconds that a Retry-After asks for (RFC 9110, 10.2.3); 0 where it says nothing usable."""
    if header is None or len(header) > 100:
        return 0.0
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - time()
        except (ValueError, OverflowError):
            return 0.0
    # Also what is not a number.
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s > 0.0 else 0.0
