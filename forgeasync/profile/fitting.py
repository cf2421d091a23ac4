"""Least squares of what cannot be negative."""

import itertools

import numpy as np


def fit_not_negative(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return x >= 0 with the least squares of ``terms @ x - values``; where several are as good, the one with
    the fewest and the last terms.

    All choices of terms that may be used are tried, which is exact (Lawson, Hanson 1974, ch. 23: the solution
    is the unconstrained one of its positive terms) and quick for a handful of them.
    """
    num_terms = terms.shape[1]
    best, least = np.zeros(num_terms), float((values**2).sum())
    for size in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(reversed(range(num_terms)), size):
            columns = terms[:, chosen]
            solution, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
            if rank < size or (solution < 0.0).any():
                continue
            error = float(((columns @ solution - values) ** 2).sum())
            if error < least - 1e-12 * float((values**2).sum()):
                least = error
                best = np.zeros(num_terms)
                best[list(chosen)] = solution
    return [float(one) for one in best]
