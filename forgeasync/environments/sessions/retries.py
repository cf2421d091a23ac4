"""Matching of requests with samplings: each begins a sampling, or joins that of an earlier attempt.

A pure state machine. Both SDKs send ``x-stainless-retry-count`` and, if configured, ``Idempotency-Key``:
- A request with a key joins the sampling of the first request with this key, whatever its count is.
- A first attempt (count 0) without a key begins a sampling, even if another request has the same body:
  parallel sub-agents send the same requests.
- A later attempt joins a sampling with the same body. It prefers one without waiting requests that was not
  delivered. Otherwise it begins a sampling if an attempt with this body was refused or has failed, since it
  is the retry of that attempt. Otherwise it joins one that was delivered (the response may be lost), or one
  with waiting requests.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_FAILED = 1024
"""Maximum number of bodies whose refused or failed attempts are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The parts of a request that identify it."""

    digest: bytes
    """Digest of the path and the body."""
    num_retries: int
    idempotency_key: str | None


@dataclass(slots=True, kw_only=True, eq=False)
class Sampling(Generic[T]):
    """Turns of a request, in flight or finished."""

    attempt: Attempt
    work: T
    num_waiting: int = 0
    """Number of requests that wait for the turns."""
    is_delivered: bool = False
    """Whether a response was written completely."""
    ended_s: float | None = None


class KeyReused(ValueError):
    """An idempotency key came with two bodies."""


class Samplings(Generic[T]):
    """The samplings of one session. Times are in seconds of one clock."""

    def __init__(self, *, keep_s: float, max_kept: int) -> None:
        """Samplings that have ended are kept for ``keep_s``, at most ``max_kept`` of them."""
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._all: list[Sampling[T]] = []
        self._num_failed: OrderedDict[bytes, int] = OrderedDict()

    def find(self, attempt: Attempt) -> Sampling[T] | None:
        """Return the sampling that the attempt joins; None if it begins one.

        Raises:
            KeyReused: An earlier request had the same key and another body.
        """
        if attempt.idempotency_key is not None:
            for one in self._all:
                if one.attempt.idempotency_key == attempt.idempotency_key:
                    if one.attempt.digest != attempt.digest:
                        raise KeyReused(attempt.idempotency_key)
                    return one
            return None
        if not attempt.num_retries:
            return None
        same = [
            one
            for one in self._all
            if one.attempt.digest == attempt.digest and one.attempt.idempotency_key is None
        ]
        lost = [one for one in same if not one.num_waiting and not one.is_delivered]
        if lost:
            return lost[0]
        if num_failed := self._num_failed.pop(attempt.digest, 0):
            if num_failed > 1:
                self._num_failed[attempt.digest] = num_failed - 1
            return None
        return max(same, key=lambda one: (not one.num_waiting, one.is_delivered), default=None)

    def begin(self, attempt: Attempt, work: T) -> Sampling[T]:
        """Add a sampling."""
        sampling = Sampling(attempt=attempt, work=work)
        self._all.append(sampling)
        return sampling

    def refused(self, attempt: Attempt) -> None:
        """Record that the client of an attempt must retry, because nothing was sampled for it."""
        if attempt.idempotency_key is None:
            self._num_failed[attempt.digest] = self._num_failed.pop(attempt.digest, 0) + 1
            while len(self._num_failed) > MAX_FAILED:
                self._num_failed.popitem(last=False)

    def ended(self, sampling: Sampling[T], *, has_failed: bool, now_s: float) -> None:
        """Record the end of a sampling. A failed one is removed, so that a retry samples again."""
        sampling.ended_s = now_s
        if has_failed and sampling in self._all:
            self._all.remove(sampling)

    def expired(self, now_s: float) -> list[Sampling[T]]:
        """Remove and return the samplings beyond the limits of time and number."""
        idle = [one for one in self._all if one.ended_s is not None and not one.num_waiting]
        num_over = len(idle) - self._max_kept
        gone = [
            one
            for index, one in enumerate(idle)
            if index < num_over or (one.ended_s is not None and now_s - one.ended_s > self._keep_s)
        ]
        self._all = [one for one in self._all if one not in gone]
        return gone

    def clear(self) -> list[Sampling[T]]:
        """Remove and return all samplings."""
        gone, self._all = self._all, []
        return gone
