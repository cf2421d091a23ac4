"""A limit on how often something begins: a pure token bucket."""


class TokenBucket:
    """Holds up to ``burst`` tokens and gets ``per_s`` new ones a second; what begins takes one.

    In any t seconds at most ``burst + per_s * t`` calls begin (generic cell rate algorithm, ITU-T I.371).
    Times are in seconds of one clock, which the caller reads and which never goes back.
    """

    def __init__(self, per_s: float, *, burst: float = 1.0) -> None:
        """The bucket is full. Raises ValueError where a number is not above 0, or ``burst`` less than 1."""
        if not per_s > 0.0 or not burst >= 1.0:
            raise ValueError(f"TokenBucket: per_s = {per_s} must be above 0, and burst = {burst} at least 1")
        self._interval_s = 1.0 / per_s
        self._tolerance_s = (burst - 1.0) * self._interval_s
        self._next_s: float | None = None
        """When the bucket would be full again if nothing more began; None: it never was touched."""

    def wait_s(self, now_s: float) -> float:
        """How long the next call would have to wait; takes nothing."""
        return 0.0 if self._next_s is None else max(0.0, self._next_s - self._tolerance_s - now_s)

    def take(self, now_s: float) -> float:
        """Take the next token, which may still have to come; returns how long to wait for it."""
        wait_s = self.wait_s(now_s)
        self._next_s = max(now_s, now_s if self._next_s is None else self._next_s) + self._interval_s
        return wait_s
