"""Which experts the generator took for each token: the record behind Keep Routing.

Shape suffixes: S tokens of one sequence, R those of them with a record, M MoE layers, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class RecordError(ValueError):
    """A rollout's record contradicts its tokens or the model: it must not be trained on."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        super().__init__(f"{field}: found {found}; {expected}")
        self.field = field


NO_RECORD = -1
"""Expert id of a token that the generator has no record of; expert 0 is a real expert."""


def expert_dtype(num_experts: int) -> np.dtype:
    """The smallest integer type that holds every expert id: uint8 up to 256 experts, else uint16."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Expert ids of the recorded tokens of a sequence, in its order.

    ``expert_ids_RMK``: uint8 or uint16, ascending within a token and layer: routing chooses a set, and the
    order an engine lists it in means nothing. ``is_recorded_S``: bool, True for exactly R tokens.
    """

    expert_ids_RMK: np.ndarray
    is_recorded_S: np.ndarray

    @classmethod
    def from_rows(cls, expert_ids_RMK: np.ndarray, *, num_tokens: int, num_experts: int) -> "RoutedExperts":
        """Rows of the first R of ``num_tokens`` tokens, as an engine hands them out (any order within K)."""
        is_recorded_S = np.arange(num_tokens) < len(expert_ids_RMK)
        ids_RMK = np.sort(expert_ids_RMK, axis=-1)
        # Ids that the narrow type cannot hold stay as they are, for ``check_routing`` to name.
        if ids_RMK.size == 0 or (ids_RMK.min() >= 0 and ids_RMK.max() < num_experts):
            ids_RMK = ids_RMK.astype(expert_dtype(num_experts))
        return cls(expert_ids_RMK=ids_RMK, is_recorded_S=is_recorded_S)

    @property
    def num_tokens(self) -> int:
        return len(self.is_recorded_S)

    @property
    def num_recorded(self) -> int:
        return len(self.expert_ids_RMK)

    def split(self, index: int) -> tuple["RoutedExperts", "RoutedExperts"]:
        """The records of tokens [0, index) and of the rest; views."""
        num_before = int(self.is_recorded_S[:index].sum())
        return (
            RoutedExperts(
                expert_ids_RMK=self.expert_ids_RMK[:num_before], is_recorded_S=self.is_recorded_S[:index]
            ),
            RoutedExperts(
                expert_ids_RMK=self.expert_ids_RMK[num_before:], is_recorded_S=self.is_recorded_S[index:]
            ),
        )

    def to_dense(self) -> np.ndarray:
        """Ids of every token, int16 [S, M, K]; ``NO_RECORD`` where there is none."""
        dense_SMK = np.full((self.num_tokens, *self.expert_ids_RMK.shape[1:]), NO_RECORD, np.int16)
        dense_SMK[self.is_recorded_S] = self.expert_ids_RMK
        return dense_SMK

    def equals(self, other: "RoutedExperts") -> bool:
        return np.array_equal(self.is_recorded_S, other.is_recorded_S) and np.array_equal(
            self.expert_ids_RMK, other.expert_ids_RMK
        )


def concatenate_routing(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """Records of consecutive tokens as one."""
    return RoutedExperts(
        expert_ids_RMK=np.concatenate([part.expert_ids_RMK for part in parts]),
        is_recorded_S=np.concatenate([part.is_recorded_S for part in parts]),
    )


def check_routing(
    record: RoutedExperts, *, num_tokens: int, num_layers: int, top_k: int, num_experts: int
) -> None:
    """Check a record against its sequence and the model.

    Raises:
        RecordError: another number of tokens, layers or experts a token, an id out of range, or one
            expert twice in a token; names field, value and what would be right.
    """
    ids_RMK = record.expert_ids_RMK
    if record.num_tokens != num_tokens:
        raise RecordError(
            "routed_experts", f"{record.num_tokens} tokens", f"must be the sequence's {num_tokens}"
        )
    if ids_RMK.ndim != 3 or ids_RMK.shape[1] != num_layers:
        layers = ids_RMK.shape[1] if ids_RMK.ndim == 3 else ids_RMK.shape
        raise RecordError(
            "routed_experts", f"{layers} layers", f"must be the model's {num_layers} MoE layers"
        )
    if ids_RMK.shape[2] != top_k:
        raise RecordError(
            "routed_experts", f"{ids_RMK.shape[2]} experts per token", f"must be the model's top_k = {top_k}"
        )
    if record.num_recorded != int(record.is_recorded_S.sum()):
        raise RecordError(
            "routed_experts",
            f"{record.num_recorded} rows",
            f"must be one for each of the {int(record.is_recorded_S.sum())} tokens marked as recorded",
        )
    if ids_RMK.size == 0:
        return
    lowest, highest = int(ids_RMK.min()), int(ids_RMK.max())
    if lowest < 0 or highest >= num_experts:
        value = lowest if lowest < 0 else highest
        raise RecordError("routed_experts", f"expert id {value}", f"must lie in [0, {num_experts})")
    is_repeated_RM = (ids_RMK[..., 1:] == ids_RMK[..., :-1]).any(-1)
    if is_repeated_RM.any():
        row, layer = np.argwhere(is_repeated_RM)[0].tolist()
        raise RecordError(
            "routed_experts",
            f"ids {ids_RMK[row, layer].tolist()} of recorded token {row} in layer {layer}",
            "a token must have an expert at most once",
        )
