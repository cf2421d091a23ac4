"""Values and texts of single tokens, for tools that show a run to people.

The values of a token are those that its optimizer step used; nothing is computed a second time. Its text is
decoded in the same way as the generator does; nothing is re-tokenized.

Shape suffixes: N tokens, M MoE layers, P tokens of a prompt, T tokens of a response.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

NUM_WORST = 10
"""Number of tokens of a batch that are reported for having the largest mismatch."""


class Decision(IntEnum):
    """Choice of experts at one token in one MoE layer, compared with the generator's record."""

    OWN = 0
    """No record was replayed, so the trainer's gate chose."""
    SAME = 1
    """The trainer's own gate would have chosen the set of experts that was replayed."""
    OTHER = 2
    """The trainer's own gate would have chosen another set than the replayed one."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RolloutKey:
    """Identifies one rollout of a run."""

    group_id: int
    episode: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BranchKey:
    """Identifies one branch of a rollout of a run."""

    rollout: RolloutKey
    branch: int
    """Index of the branch in its rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of trained tokens. Arrays are float32 unless stated otherwise."""

    positions_N: np.ndarray
    """Position of each token in the response of its branch, int32."""
    token_ids_N: np.ndarray
    """Token ids, int32."""
    logprobs_N: np.ndarray
    """Log-probabilities computed by the trainer."""
    behavior_logprobs_N: np.ndarray
    """Log-probabilities that the generator recorded when it sampled the tokens."""
    ratios_N: np.ndarray
    """Importance ratios that the objective used."""
    advantages_N: np.ndarray
    """Advantages that the objective used, after subtraction of the penalty to go of a KL penalty."""
    entropies_N: np.ndarray
    """Entropy in nats of the distribution under which each token trains."""
    versions_N: np.ndarray
    """Policy version that sampled each token, int32."""
    num_kept_N: np.ndarray
    """Size of each token's kept set, int32; 0 for the whole vocabulary."""
    decisions_MN: np.ndarray | None
    """``Decision`` in each layer at the position that predicts the token, uint8; None without replay."""

    @property
    def mismatch_N(self) -> np.ndarray:
        """Trainer's minus generator's log-probability of each token, float32, as in the mismatch metrics."""
        with np.errstate(invalid="ignore"):
            return self.logprobs_N - self.behavior_logprobs_N

    def take(self, indices: np.ndarray) -> "TokenValues":
        """Return the values of the tokens at these indices."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        selected = {name: array[..., indices] for name, array in arrays.items() if array is not None}
        return replace(self, **selected)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchValues:
    """Values of all trained tokens of one branch, with the ids of the whole sequence (int32)."""

    key: BranchKey
    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    values: TokenValues


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """One of the tokens with the largest mismatch. ``values`` has N = 1."""

    key: BranchKey
    values: TokenValues

    @property
    def rank(self) -> tuple[float, BranchKey, int]:
        """Sort key that puts the largest absolute mismatch first, and nan before all numbers."""
        mismatch = abs(float(self.values.mismatch_N[0]))
        size = float("inf") if np.isnan(mismatch) else mismatch
        return -size, self.key, int(self.values.positions_N[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """Token values of a batch, from one rank or merged from all ranks (``merged_reports``)."""

    branches: tuple[BranchValues, ...] = ()
    """Requested branches, sorted by key."""
    worst: tuple[WorstToken, ...] = ()
    """At most ``NUM_WORST`` tokens with the largest mismatch, the worst first."""


def merged_reports(reports: Sequence[TokenReport]) -> TokenReport:
    """Merge the reports of different rows. The result does not depend on the order or number of ranks."""
    return TokenReport(
        branches=tuple(
            sorted((one for report in reports for one in report.branches), key=lambda one: one.key)
        ),
        worst=tuple(
            sorted((one for report in reports for one in report.worst), key=lambda one: one.rank)[:NUM_WORST]
        ),
    )


INVALID_PREFIX = "Invalid prefix encountered"
"""Prefix of the message of an error from ``tokenizers``, as in ``vllm.v1.engine.detokenizer``."""

Piece = str | dict[str, str]
"""JSON representation of a token.

A string is the text that the token adds to the response. ``{"bytes": hex, "text": text}`` is a token whose
bytes differ from the text that it adds, often because they are only part of a character. ``{"special":
name}`` is a special token, which adds no text.
"""


def decoded(tokenizer: Tokenizer, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> Iterator[str]:
    """Yield the text that each token adds to the response. Joined, the texts are the response's text.

    If the bytes of a character are spread over several tokens, the last of them adds it. Special tokens add
    nothing.
    """
    # The prompt's tokens decide whether a space comes before the first word, as in vLLM.
    stream = DecodeStream(ids=prompt_ids_P.tolist(), skip_special_tokens=True)
    for token in response_ids_T.tolist():
        try:
            text = stream.step(tokenizer, token)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Invalid bytes can break a stream. Start another one, as vLLM does.
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(tokenizer, token)
        yield text or ""


class TokenPieces:
    """Converts tokens to their JSON representation (``Piece``), for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        # Added tokens are stored as text, even if the rest of the vocabulary is stored as bytes.
        self._plain = added.keys() - self._special.keys()
        # The decoder's pickled state is JSON. The JSON of the whole tokenizer would include its vocabulary.
        decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        kinds = {one["type"] for one in decoder.get("decoders", [decoder]) if "type" in one}
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds

    def of_response(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> list[Piece]:
        """Return the piece of each token of a response. Joined, their texts are the response's text."""
        texts = decoded(self._tokenizer, prompt_ids_P, response_ids_T)
        return [self._piece(token, text) for token, text in zip(response_ids_T.tolist(), texts, strict=True)]

    def of_token(self, token: int) -> Piece:
        """Return the piece of a single token, without context."""
        (piece,) = self.of_response(np.zeros(0, np.int32), np.array([token], np.int32))
        return piece

    def _piece(self, token: int, text: str) -> Piece:
        if token in self._special and not text:
            return {"special": self._special[token]}
        own = self._bytes(token)
        if own is None or own == text.encode():
            return text
        return {"bytes": own.hex(), "text": text}

    def _bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token stands for; None if the vocabulary stores it as text."""
        if token in self._special or token in self._plain:
            return None
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None
        if self._byte_of is not None:
            known = [self._byte_of.get(character) for character in name]
            return None if None in known else bytes(one for one in known if one is not None)
        if self._falls_back and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for their own byte. Characters 256, 257 and so on stand for the other
    bytes, in order. Source: ``bytes_to_unicode`` of Radford et al., "Language Models are Unsupervised
    Multitask Learners", 2019.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): byte for byte in own} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
    assert alphabet.keys() == set(ByteLevel.alphabet()), "the alphabet of tokenizers"
    return alphabet
