"""tokens.jsonl: the values of single tokens, for people who look at a run (format: docs/viewer.md).

A line for each rollout that is in rollouts.jsonl, and one with the worst tokens of the step. The values are
those that the optimizer step has computed from, to ``NUM_DIGITS`` significant digits.

Shape suffixes: N trained tokens of a branch, T its response tokens, M MoE layers.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from forgeasync.observability.metrics import JsonLines
from forgeasync.rollouts import (
    BranchValues,
    Decision,
    RolloutKey,
    TokenPieces,
    TokenReport,
    TokenValues,
    WorstToken,
)

NUM_DIGITS = 5

NUM_NONFINITE = "metrics/num_nonfinite_token_values"

_SIGNS = {Decision.OWN: "-", Decision.SAME: "0", Decision.OTHER: "1"}


class TokenLines:
    """Writes tokens.jsonl, and counts what is no number."""

    def __init__(self, path: Path, pieces: TokenPieces | None) -> None:
        """``pieces`` None: the file has numbers only, and nothing that was said."""
        self.lines = JsonLines(path)
        self._pieces = pieces
        self._kept: list[dict[str, object]] = []
        self._num_nonfinite = 0

    def prepare(self, step: int, report: TokenReport) -> dict[str, float]:
        """Make the lines of a step, for ``write``; their metrics, by name."""
        self._num_nonfinite = 0
        by_rollout = groupby(report.branches, key=lambda one: one.key.rollout)
        self._kept = [self._rollout(step, key, list(branches)) for key, branches in by_rollout]
        worst = [self._worst(token) for token in report.worst]
        self._kept.append({"step": step, "worst": worst})
        return {NUM_NONFINITE: self._num_nonfinite}

    def write(self) -> None:
        """Append the lines that were made last."""
        for line in self._kept:
            self.lines.append(line)
        self._kept = []

    def _rollout(self, step: int, key: RolloutKey, branches: Sequence[BranchValues]) -> dict[str, object]:
        return {"step": step, **_names(key), "branches": [self._branch(one) for one in branches]}

    def _branch(self, branch: BranchValues) -> dict[str, object]:
        pieces = None
        if self._pieces is not None:
            pieces = self._pieces.of_response(branch.prompt_ids_P, branch.response_ids_T)
        values = branch.values
        return {
            "branch": branch.key.branch,
            "num_tokens": len(branch.response_ids_T),
            "pieces": pieces,
            "positions": values.positions_N.tolist(),
            **{name: self._numbers(numbers_N) for name, numbers_N in _columns(values).items()},
            "version": values.versions_N.tolist(),
            "kept": values.num_kept_N.tolist(),
            "disagreement": _disagreement(values),
        }

    def _worst(self, token: WorstToken) -> dict[str, object]:
        values = token.values
        piece = None if self._pieces is None else self._pieces.of_token(int(values.token_ids_N[0]))
        return {
            **_names(token.key.rollout),
            "branch": token.key.branch,
            "position": int(values.positions_N[0]),
            "piece": piece,
            **{name: self._numbers(numbers_N)[0] for name, numbers_N in _columns(values).items()},
            "version": int(values.versions_N[0]),
            "kept": int(values.num_kept_N[0]),
            "disagreement": _disagreement(values),
        }

    def _numbers(self, values_N: np.ndarray) -> list[float | None]:
        """Round; what is no finite number becomes null, and is counted."""
        found = [
            float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None for value in values_N.tolist()
        ]
        self._num_nonfinite += found.count(None)
        return found

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.lines.close()


def _names(key: RolloutKey) -> dict[str, object]:
    return {"group_id": key.group_id, "episode": key.episode, "agent": key.agent}


def _columns(values: TokenValues) -> dict[str, np.ndarray]:
    return {
        "logprob": values.logprobs_N,
        "behavior": values.behavior_logprobs_N,
        "mismatch": values.mismatch_N,
        "ratio": values.ratios_N,
        "advantage": values.advantages_N,
        "entropy": values.entropies_N,
    }


def _disagreement(values: TokenValues) -> list[str] | None:
    """A text for each layer with a character for each token; None where nothing was replayed."""
    if values.decisions_MN is None:
        return None
    return ["".join(_SIGNS[Decision(one)] for one in layer_N) for layer_N in values.decisions_MN.tolist()]
