"""What lies between the measured points of a profile, as functions that are called millions of times."""

import bisect
from collections.abc import Sequence

import numpy as np

from forgeasync.profile.fitting import fit_not_negative
from forgeasync.profile.profile import DecodePoint, TrainPoint


class DecodeTable:
    """Seconds of a decode step by number of running sequences and mean context: bilinear between points.

    Beyond the points the last two go on as a straight line, which is never below the nearest point: a step
    does not get faster with more to do. ``num_beyond`` says how often that was asked for.
    """

    def __init__(self, points: Sequence[DecodePoint]) -> None:
        self._running = sorted({one.num_running for one in points})
        self._contexts = sorted({one.num_context_tokens for one in points})
        by_cell = {(one.num_running, one.num_context_tokens): one.step_s.mean for one in points}
        self._steps_s = [
            [by_cell[running, context] for context in self._contexts] for running in self._running
        ]
        self._columns: dict[int, list[float]] = {}
        """What was computed for numbers of sequences that were asked for before."""
        self.num_beyond = 0

    @property
    def depends_on_context(self) -> bool:
        """Whether more than one length of context was measured."""
        return len(self._contexts) > 1

    def step_s(self, num_running: int, num_context_tokens: float) -> float:
        """Return the seconds of one step; there are running sequences."""
        assert num_running > 0
        if num_running > self._running[-1]:
            self.num_beyond += 1
        column = self._columns.get(num_running)
        if column is None:
            column = self._columns[num_running] = self._column(num_running)
        return _line(self._contexts, column, num_context_tokens)

    def _column(self, num_running: int) -> list[float]:
        """Seconds by context, for a number of sequences."""
        rows = zip(*self._steps_s, strict=True)
        return [_line(self._running, row, num_running) for row in rows]


def _line(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place: linear between places that ascend, and beyond them as documented above."""
    if len(places) == 1 or at <= places[0]:
        return values[0]
    index = min(bisect.bisect_left(places, at), len(places) - 1)
    low, high = places[index - 1], places[index]
    value = values[index - 1] + (values[index] - values[index - 1]) * (at - low) / (high - low)
    return max(value, values[index]) if at > high else value


class TrainTable:
    """Seconds of an optimizer step: fixed + per row + per token, none of them negative.

    Fitted to the points by least squares of the relative error, so that short steps count as much as long
    ones, and each point as often as it was measured. With too few points for three terms the simplest fit
    that is as good is taken: tokens, then fixed, then rows.
    """

    def __init__(self, points: Sequence[TrainPoint]) -> None:
        measured = np.array([one.step_s.mean for one in points])
        terms = np.array([[one.num_rows, 1.0, one.num_tokens] for one in points])
        weights = np.sqrt([max(1, one.step_s.num_samples) for one in points])
        found = fit_not_negative(terms * (weights / measured)[:, None], weights)
        self.row_s, self.fixed_s, self.token_s = found
        fitted = terms @ found
        self.largest_error = float(np.abs(fitted / measured - 1.0).max())
        """Largest relative difference between the fit and a point."""

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a step with so many rows of each data rank and so many tokens in them."""
        return self.fixed_s + self.row_s * num_rows + self.token_s * num_tokens
