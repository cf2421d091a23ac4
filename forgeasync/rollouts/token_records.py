"""Records of routed experts and kept sets that the generator makes for each token, with their checks.

``RoutedExperts`` has the experts that each token was routed to (for Keep Routing). ``KeptTokens`` has the
tokens that could have been drawn at each step (for Keep Sampling Mask). ``OperatorTrace`` has what operators
computed, for a token whose log-probability differs between trainer and generator.

Shape suffixes: S tokens of one sequence, R those of them with a routing record, M MoE layers, K top-k;
T response tokens, N kept ids of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgeasync.config import ModelFacts

if TYPE_CHECKING:
    from forgeasync.rollouts.rollout import Rollout

NO_RECORD = -1
"""Expert id of tokens without a routing record. Expert 0 is a real expert."""

NO_DISTRIBUTION = -1
"""The only id in the kept set of a token whose log-probabilities were not numbers.

``check_rollout`` refuses it. An empty set would mean that the whole vocabulary was kept.
"""

MAX_LOGPROB = 1e-3
"""Largest log-probability that rounding can produce for a token of probability 1."""


class RecordError(ValueError):
    """The record of a rollout contradicts its tokens or the model, so the rollout must not train."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        """``expected`` is the part of the message that says what would be right."""
        super().__init__(f"{field}: found {found}; {expected}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """Selection of the records that an engine makes, besides tokens and log-probabilities."""

    routing: bool
    """Whether to record the experts that each token was routed to in each MoE layer."""
    kept_tokens: bool
    """Whether to record the tokens that could have been drawn at each step."""
    num_dense_layers: int = 0
    """Number of initial layers that have no experts, and thus no routing record."""
    execution: bool = False
    """Whether the tokens must tell how to sample them again (``record_execution``)."""


def expert_dtype(num_experts: int) -> np.dtype:
    """Return the smallest integer type for expert ids: uint8 up to 256 experts, otherwise uint16."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Expert ids of the recorded tokens of a sequence, in token order."""

    expert_ids_RMK: np.ndarray
    """Expert ids, uint8 or uint16, ascending within each token and layer.

    Routing chooses a set of experts, and the order in which an engine lists them has no meaning.
    """
    is_recorded_S: np.ndarray
    """Whether each token has a record, bool; True for exactly R tokens."""

    @classmethod
    def from_rows(cls, expert_ids_RMK: np.ndarray, *, num_tokens: int, num_experts: int) -> "RoutedExperts":
        """Create the record of a sequence of ``num_tokens`` tokens from an engine's rows for the first R.

        The K ids of a row may be in any order.
        """
        is_recorded_S = np.arange(num_tokens) < len(expert_ids_RMK)
        ids_RMK = np.sort(expert_ids_RMK, axis=-1)
        # Ids out of range keep their wide type, so that ``check_rollout`` can report them.
        if ids_RMK.size == 0 or (ids_RMK.min() >= 0 and ids_RMK.max() < num_experts):
            ids_RMK = ids_RMK.astype(expert_dtype(num_experts))
        return cls(expert_ids_RMK=ids_RMK, is_recorded_S=is_recorded_S)

    @property
    def num_tokens(self) -> int:
        """Number of tokens S of prompt and response."""
        return len(self.is_recorded_S)

    @property
    def num_recorded(self) -> int:
        """Number of tokens R whose experts are recorded."""
        return len(self.expert_ids_RMK)

    def split(self, index: int) -> tuple["RoutedExperts", "RoutedExperts"]:
        """Return the records of tokens [0, index) and of the rest, as views."""
        rows = np.split(self.expert_ids_RMK, [int(self.is_recorded_S[:index].sum())])
        before, after = (
            RoutedExperts(expert_ids_RMK=ids_RMK, is_recorded_S=is_recorded_S)
            for ids_RMK, is_recorded_S in zip(rows, np.split(self.is_recorded_S, [index]), strict=True)
        )
        return before, after

    def to_dense(self) -> np.ndarray:
        """Return the ids of every token, int16 [S, M, K], with ``NO_RECORD`` for tokens without a record."""
        dense_SMK = np.full((self.num_tokens, *self.expert_ids_RMK.shape[1:]), NO_RECORD, np.int16)
        dense_SMK[self.is_recorded_S] = self.expert_ids_RMK
        return dense_SMK


def concatenate_routing(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """Concatenate the records of consecutive tokens."""
    return RoutedExperts(
        expert_ids_RMK=np.concatenate([part.expert_ids_RMK for part in parts]),
        is_recorded_S=np.concatenate([part.is_recorded_S for part in parts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Kept sets of a response in CSR format: row t is ``ids_N[offsets[t]:offsets[t + 1]]``.

    An empty row means that the whole vocabulary was kept.
    """

    offsets: np.ndarray
    """Offsets of the rows, int64 [T + 1]."""
    ids_N: np.ndarray
    """Kept ids of all rows, int32, ascending within each row."""

    @classmethod
    def of_widths(cls, widths_T: np.ndarray, ids_N: np.ndarray) -> "KeptTokens":
        """Create the record from the sizes of the sets and their ids, which ascend within each set."""
        offsets = np.zeros(len(widths_T) + 1, np.int64)
        np.cumsum(widths_T, out=offsets[1:])
        return cls(offsets=offsets, ids_N=ids_N)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | np.ndarray], *, vocab_size: int) -> "KeptTokens":
        """Create the record from the kept ids of each token, in any order.

        Rows of ``vocab_size`` ids are stored as empty rows.
        """
        widths_T = np.asarray([len(row) for row in rows], np.int64)
        ids_N = np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32)
        return cls.from_widths(widths_T, ids_N, vocab_size=vocab_size)

    @classmethod
    def from_widths(cls, widths_T: np.ndarray, ids_N: np.ndarray, *, vocab_size: int) -> "KeptTokens":
        """Create the record as ``from_rows`` does, from the sizes of rows and the ids of all rows (int32)."""
        row_of_N = np.repeat(np.arange(len(widths_T)), widths_T)
        is_cut_T = widths_T < vocab_size
        is_stored_N = is_cut_T[row_of_N]
        ids_N, row_of_N = ids_N[is_stored_N], row_of_N[is_stored_N]
        # vLLM's samplers list ids in ascending order, and sorting takes most of the time.
        is_ascending_N = (ids_N[1:] > ids_N[:-1]) | (row_of_N[1:] > row_of_N[:-1])
        if not is_ascending_N.all():
            ids_N = ids_N[np.lexsort((ids_N, row_of_N))]
        return cls.of_widths(np.where(is_cut_T, widths_T, 0), ids_N)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens T."""
        return len(self.offsets) - 1

    def slice(self, start: int, end: int) -> "KeptTokens":
        """Return the sets of tokens [start, end)."""
        first, last = self.offsets[start], self.offsets[end]
        return KeptTokens(offsets=self.offsets[start : end + 1] - first, ids_N=self.ids_N[first:last])

    def row(self, index: int) -> np.ndarray:
        """Return the kept ids of one token; empty for the whole vocabulary."""
        return self.ids_N[self.offsets[index] : self.offsets[index + 1]]

    def take(self, is_taken_T: np.ndarray) -> "KeptTokens":
        """Return the sets of the tokens marked in ``is_taken_T`` (bool)."""
        widths_T = np.diff(self.offsets)
        return KeptTokens.of_widths(widths_T[is_taken_T], self.ids_N[np.repeat(is_taken_T, widths_T)])


def all_kept(num_tokens: int) -> KeptTokens:
    """Return the record of a response sampled from the whole vocabulary."""
    return KeptTokens(offsets=np.zeros(num_tokens + 1, np.int64), ids_N=np.empty(0, np.int32))


def concatenate_kept_tokens(parts: Sequence[KeptTokens]) -> KeptTokens:
    """Concatenate the kept sets of consecutive tokens. ``parts`` may be empty."""
    parts = [all_kept(0), *parts]
    return KeptTokens.of_widths(
        np.concatenate([np.diff(part.offsets) for part in parts]),
        np.concatenate([part.ids_N for part in parts]),
    )


def check_rollout(rollout: "Rollout", records: CaptureSpec, facts: ModelFacts) -> None:
    """Check that a rollout has the records that ``records`` selects, and that they fit tokens and model.

    Raises:
        RecordError: A record is missing or wrong. The message names the field, the value and the remedy.
    """
    num_response_tokens = rollout.num_response_tokens
    if len(rollout.logprobs_T) != num_response_tokens:
        raise RecordError(
            "logprobs",
            f"{len(rollout.logprobs_T)} values",
            f"must be {num_response_tokens}, one for each token of the response",
        )
    # A single NaN would spread to all gradients of its batch.
    is_sound_T = np.isfinite(rollout.logprobs_T) & (rollout.logprobs_T <= MAX_LOGPROB)
    if not is_sound_T.all():
        token = int(np.argmin(is_sound_T))
        raise RecordError(
            "logprobs",
            f"{rollout.logprobs_T[token]:g} at response token {token}",
            "must be finite and at most 0, as every logarithm of a probability",
        )
    if records.routing:
        if rollout.routed_experts is None:
            raise RecordError(
                "routed_experts", "none", "trainer.routing_replay needs the engine to record them"
            )
        _check_routing(
            rollout.routed_experts, num_tokens=len(rollout.prompt_ids_P) + num_response_tokens, facts=facts
        )
    if records.kept_tokens:
        if rollout.kept_tokens is None:
            raise RecordError(
                "kept_tokens", "none", "trainer.keep_sampling_mask needs the engine to record them"
            )
        check_kept_tokens(rollout.kept_tokens, rollout.response_ids_T, vocab_size=facts.vocab_size)


def _check_routing(record: RoutedExperts, *, num_tokens: int, facts: ModelFacts) -> None:
    """Check the record's numbers of tokens, layers and experts per token, and its expert ids."""
    ids_RMK = record.expert_ids_RMK
    if record.num_tokens != num_tokens:
        raise RecordError(
            "routed_experts", f"{record.num_tokens} tokens", f"must be the sequence's {num_tokens}"
        )
    if ids_RMK.ndim != 3 or ids_RMK.shape[1] != facts.num_moe_layers:
        layers = ids_RMK.shape[1] if ids_RMK.ndim == 3 else ids_RMK.shape
        raise RecordError(
            "routed_experts", f"{layers} layers", f"must be the model's {facts.num_moe_layers} MoE layers"
        )
    if ids_RMK.shape[2] != facts.top_k:
        raise RecordError(
            "routed_experts",
            f"{ids_RMK.shape[2]} experts per token",
            f"must be the model's top_k = {facts.top_k}",
        )
    num_marked = int(record.is_recorded_S.sum())
    if record.num_recorded != num_marked:
        raise RecordError(
            "routed_experts",
            f"{record.num_recorded} rows",
            f"must be one for each of the {num_marked} tokens marked as recorded",
        )
    if ids_RMK.size == 0:
        return
    _check_range("routed_experts", "expert", ids_RMK, facts.num_experts)
    is_repeated_RM = (ids_RMK[..., 1:] == ids_RMK[..., :-1]).any(-1)
    if is_repeated_RM.any():
        row, layer = np.argwhere(is_repeated_RM)[0].tolist()
        raise RecordError(
            "routed_experts",
            f"ids {ids_RMK[row, layer].tolist()} of recorded token {row} in layer {layer}",
            "a token must have an expert at most once",
        )


def check_kept_tokens(kept: KeptTokens, response_ids_T: np.ndarray, *, vocab_size: int) -> None:
    """Check kept sets against the sampled tokens of a response.

    Raises:
        RecordError: The number of sets is wrong, a row is ``NO_DISTRIBUTION``, an id is outside the
            vocabulary or twice in a row, or a set lacks its sampled token.
    """
    if kept.num_tokens != len(response_ids_T):
        raise RecordError(
            "kept_tokens",
            f"{kept.num_tokens} sets",
            f"must be {len(response_ids_T)}, one for each token of the response",
        )
    widths_T = np.diff(kept.offsets)
    if kept.offsets[0] != 0 or (widths_T < 0).any() or kept.offsets[-1] != len(kept.ids_N):
        raise RecordError(
            "kept_tokens", f"offsets up to {kept.offsets[-1]}", f"must rise from 0 to {len(kept.ids_N)}"
        )
    if kept.ids_N.size == 0:
        return
    row_of_N = np.repeat(np.arange(len(widths_T)), widths_T)
    is_unknown_N = kept.ids_N == NO_DISTRIBUTION
    if is_unknown_N.any():
        raise RecordError(
            "kept_tokens",
            f"no distribution at response token {int(row_of_N[np.argmax(is_unknown_N)])}",
            "the generator's log-probabilities must be numbers there",
        )
    _check_range("kept_tokens", "token", kept.ids_N, vocab_size)
    is_repeated_N = (np.diff(kept.ids_N) <= 0) & (np.diff(row_of_N) == 0)
    if is_repeated_N.any():
        row = int(row_of_N[np.argmax(is_repeated_N)])
        raise RecordError(
            "kept_tokens", f"set of token {row} not strictly ascending", "a set must list an id once only"
        )
    has_sampled_T = widths_T == 0
    has_sampled_T[row_of_N[kept.ids_N == response_ids_T[row_of_N]]] = True
    if not has_sampled_T.all():
        row = int(np.argmin(has_sampled_T))
        raise RecordError(
            "kept_tokens",
            f"set of token {row} without the sampled id {int(response_ids_T[row])}",
            f"the sampled id must be among its {int(widths_T[row])} ids",
        )


def _check_range(field: str, what: str, ids: np.ndarray, num_ids: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= num_ids:
        value = lowest if lowest < 0 else highest
        raise RecordError(field, f"{what} id {value}", f"must lie in [0, {num_ids})")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTrace:
    """Vectors that a forward pass has for the last of some tokens, one after each operator."""

    version: int
    """Policy version of the weights."""
    token_ids_S: np.ndarray
    logprob: float
    """Log-probability of the next token, as recorded by the generator."""
    vectors: Mapping[str, np.ndarray]
    """Vectors in the order of computation, by the names of vLLM's modules."""

    @staticmethod
    def file(folder: Path, version: int) -> Path:
        """Return the file of a version's trace in ``folder``, the run's folder of bad steps."""
        return folder / f"operators-of-version-{version:08d}.npz"

    def write(self, folder: Path) -> None:
        """Write the trace to its file, which ``numpy.load`` reads.

        Raises:
            OSError: The disk is full or fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        facts = {name: getattr(self, name) for name in ("version", "token_ids_S", "logprob")}
        np.savez(self.file(folder, self.version), allow_pickle=False, **facts, **self.vectors)

    @classmethod
    def read(cls, file: Path) -> "OperatorTrace":
        """Read a trace from its file."""
        with np.load(file) as arrays:
            version, token_ids_S, logprob, *_ = (arrays[name] for name in arrays.files)
            vectors = {name: arrays[name] for name in arrays.files[3:]}
        return cls(version=int(version), token_ids_S=token_ids_S, logprob=float(logprob), vectors=vectors)

    def compare(self, found: Mapping[str, np.ndarray]) -> str:
        """Name the first operator for which ``found`` has other bits; operators that it lacks are skipped."""
        common = [name for name in self.vectors if name in found]
        for name in common:
            if self.vectors[name].tobytes() != found[name].tobytes():
                largest = float(np.abs(self.vectors[name] - found[name]).max())
                return f"the first operator that differs is {name} (largest difference {largest:.1g})"
        return (
            f"none of {len(common)} operators differs in a prefill of the token's input: "
            "the decode, the batch or the sampler did"
        )
