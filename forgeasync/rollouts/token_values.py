"""Values and texts of single tokens, for people who look at a run.

A token's values are what its optimizer step has computed from; nothing is computed a second time. Its text
is decoded as the generator does; nothing is tokenized again.

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
"""Tokens of a batch that are kept for their mismatch."""


class Decision(IntEnum):
    """What became of the choice of experts at one token in one MoE layer."""

    OWN = 0
    """No record was replayed: the trainer chose."""
    SAME = 1
    """The trainer's own gate would have chosen the set of experts that was replayed."""
    OTHER = 2
    """The trainer's own gate would have chosen another set: a disagreement."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RolloutKey:
    """Names one rollout of a run."""

    group_id: int
    episode: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BranchKey:
    """Names one branch of a rollout of a run."""

    rollout: RolloutKey
    branch: int
    """Its place among the rollout's branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of trained tokens; float32 unless said otherwise."""

    positions_N: np.ndarray
    """int32: place among the branch's response tokens."""
    token_ids_N: np.ndarray
    """int32."""
    logprobs_N: np.ndarray
    """The trainer's."""
    behavior_logprobs_N: np.ndarray
    """The generator's, recorded when the token was sampled."""
    ratios_N: np.ndarray
    """Importance ratios as the objective has them."""
    advantages_N: np.ndarray
    """As the objective saw them: less the penalty to go where a KL penalty is in the reward."""
    entropies_N: np.ndarray
    """Of the distribution that the token is trained under, in nats."""
    versions_N: np.ndarray
    """int32: which policy version sampled the token."""
    num_kept_N: np.ndarray
    """int32: number of tokens that sampling kept; 0 where it kept the whole vocabulary."""
    decisions_MN: np.ndarray | None
    """uint8, ``Decision``: at the position that predicts the token. None where its row replayed nothing."""

    @property
    def mismatch_N(self) -> np.ndarray:
        """Trainer's less generator's log-probability, float32 [N]: what the metrics of mismatch are of."""
        with np.errstate(invalid="ignore"):
            return self.logprobs_N - self.behavior_logprobs_N

    def take(self, indices: np.ndarray) -> "TokenValues":
        """Return the values of some of the tokens."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        taken = {name: array[..., indices] for name, array in arrays.items() if array is not None}
        return replace(self, **taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchValues:
    """All trained tokens of one branch, with the ids of the whole sequence (int32)."""

    key: BranchKey
    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    values: TokenValues


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token with one of the largest mismatches; ``values`` has N = 1."""

    key: BranchKey
    values: TokenValues

    @property
    def rank(self) -> tuple[float, BranchKey, int]:
        """Sorts the worst first; what is no number is worse than all numbers."""
        mismatch = abs(float(self.values.mismatch_N[0]))
        size = float("inf") if np.isnan(mismatch) else mismatch
        return -size, self.key, int(self.values.positions_N[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What a batch's tokens were like: on one rank, or on all ranks (``merged_reports``)."""

    branches: tuple[BranchValues, ...] = ()
    """Those that were asked for, by key."""
    worst: tuple[WorstToken, ...] = ()
    """At most ``NUM_WORST``, the worst first."""


def merged_reports(reports: Sequence[TokenReport]) -> TokenReport:
    """Put reports of different rows together: neither the order nor the number of ranks changes anything."""
    return TokenReport(
        branches=tuple(
            sorted((one for report in reports for one in report.branches), key=lambda one: one.key)
        ),
        worst=tuple(
            sorted((one for report in reports for one in report.worst), key=lambda one: one.rank)[:NUM_WORST]
        ),
    )


INVALID_PREFIX = "Invalid prefix encountered"
"""Beginning of an error that tokenizers raise, as in ``vllm.v1.engine.detokenizer``."""

Piece = str | dict[str, str]
"""A token in JSON. A text: what the token adds to the response. ``{"bytes": hex, "text": text}``: its bytes
are no whole characters by themselves, and what it adds is another text, often none. ``{"special": name}``: it
adds no text."""


def decoded(tokenizer: Tokenizer, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> Iterator[str]:
    """Yield what each token adds to the text of the response; together that is the text.

    A character whose bytes are spread over several tokens is added by the last of them; special tokens add
    nothing.
    """
    # As vLLM does: the prompt's tokens decide about a space before the first word.
    stream = DecodeStream(ids=prompt_ids_P.tolist(), skip_special_tokens=True)
    for token in response_ids_T.tolist():
        try:
            text = stream.step(tokenizer, token)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Bytes that are no text can break a stream; vLLM begins another one, too.
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(tokenizer, token)
        yield text or ""


class TokenPieces:
    """Says what each token of a response is, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        # Added tokens are texts, whatever the others are.
        self._plain = added.keys() - self._special.keys()
        # What it is pickled as: the whole tokenizer as text would have its vocabulary in it.
        decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        kinds = {one["type"] for one in decoder.get("decoders", [decoder]) if "type" in one}
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds

    def of_response(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> list[Piece]:
        """Return each token of a response; the texts together are the response's text."""
        texts = decoded(self._tokenizer, prompt_ids_P, response_ids_T)
        return [self._piece(token, text) for token, text in zip(response_ids_T.tolist(), texts, strict=True)]

    def of_token(self, token: int) -> Piece:
        """Return a token by itself, wherever it stands."""
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
        """The bytes that a token stands for; None where the vocabulary has texts."""
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
    """The byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable characters of Latin-1 stand for themselves, the others are 256, 257 and so on:
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, ``bytes_to_unicode``.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): byte for byte in own} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
    assert alphabet.keys() == set(ByteLevel.alphabet()), "the alphabet of tokenizers"
    return alphabet
