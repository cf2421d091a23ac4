"""Whether an endpoint is worth asking: a pure circuit breaker.

    closed ──`num_failures` in a row──► open ──after a wait──► half open ──success──► closed
                                          ▲                        │
                                          └─────── failure ────────┘ the wait doubles

While it is open nothing is asked, so that an endpoint that is down gets no storm of requests, and those that
wait do not hold places of others. Half open, one call finds out for all.
"""

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
