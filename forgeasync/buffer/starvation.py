"""Detects that a run starves because group after group is given up before it could train."""

from collections import Counter

from forgeasync.buffer.decisions import AGE_REASONS, DropReason


class NothingTrains(RuntimeError):
    """Too many groups in a row were given up: the run would generate for ever without a step."""


class StarvationWatch:
    """Counts the groups given up since the last one that came through; pure.

    Reasons of age do not count: a group only grows old because the trainer makes steps, so that a run that
    loses groups to age alone goes on. Groups that filters drop have a limit of their own
    (``forgeasync.scoring.filtering``), since a batch may need many of them.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` is the number of groups in a row that is too many (``buffer.max_given_up_in_a_row``)."""
        assert limit > 0
        self._limit = limit
        self._by_reason: Counter[DropReason] = Counter()
        self._first_problem = ""

    def came_through(self) -> None:
        """Note that a group was sampled, scored and kept."""
        self._by_reason.clear()

    def given_up(self, reason: DropReason, problem: str) -> None:
        """Note that a group was given up; ``problem`` says why.

        Raises:
            NothingTrains: this group is one too many in a row.
        """
        if reason in AGE_REASONS or reason is DropReason.FILTERED:
            return
        if not self._by_reason:
            self._first_problem = problem
        self._by_reason[reason] += 1
        if (num := self._by_reason.total()) >= self._limit:
            reasons = ", ".join(f"{count} {name}" for name, count in self._by_reason.most_common())
            raise NothingTrains(
                f"{num} groups in a row were given up ({reasons}; limit buffer.max_given_up_in_a_row = "
                f"{self._limit}); the first: {self._first_problem}"
            )
