"""Teacher behind vLLM's OpenAI-compatible server: log-probabilities of given tokens by ``prompt_logprobs``.

Tokens are sent and returned as ids, so nothing is re-tokenized. The fields are those of vLLM's extension of
``/v1/completions`` (vLLM 0.32, entrypoints/openai/completion/protocol.py); a probe before the run starts
detects servers without it.

Shape suffixes: S tokens of prompt and response, T response tokens, K ids of each token.
"""

import asyncio
import json
import math
from typing import Any, cast

import numpy as np

from forgeasync.config import TeacherEndpoint
from forgeasync.rollouts import TeacherRecord, WrongTeacherRecord
from forgeasync.scoring.endpoints import (
    EndpointClient,
    EndpointDown,
    EndpointRefuses,
    ReplyTooLong,
    RewardUnavailable,
)

BYTES_PER_ID = 512
"""Bytes per id of the longest accepted reply, in addition to ``FIXED_BYTES``."""
FIXED_BYTES = 1 << 16

STANDS_FOR_MINUS_INFINITY = -9999.0
"""Value that vLLM's server writes for minus infinity, which JSON cannot represent."""

RETRY_AFTER_S = 1.0
"""Seconds until an endpoint that does not answer is tried again, if it gives no Retry-After."""


class TeacherRefuses(ValueError):
    """The endpoint has refused the request, or its reply is not a completion with log-probabilities."""


class TeacherClient:
    """Client of one teacher's endpoint; for one event loop."""

    def __init__(self, section: TeacherEndpoint) -> None:
        """Read the key, without connecting.

        Raises:
            ValueError: The environment variable with the key is not set.
        """
        self._section = section
        self._client = EndpointClient(section)

    async def score(self, ids_S: np.ndarray, *, num_prompt: int, num_ids: int) -> TeacherRecord:
        """Return the model's scores of the tokens after the first ``num_prompt``.

        Raises:
            RewardUnavailable: There was no answer within ``limit_s``, or one with status 408, 409, 429 or
                5xx.
            TeacherRefuses: Another error status, or the reply is not a completion with log-probabilities.
            WrongTeacherRecord: The reply is for other tokens, or lacks some.
        """
        body = await self._ask(ids_S, num_ids)
        return await asyncio.to_thread(self._read, body, ids_S, num_prompt=num_prompt, num_ids=num_ids)

    async def probe(self, ids_S: np.ndarray, *, num_ids: int) -> tuple[TeacherRecord, list[str | None]]:
        """Return the record of all tokens but the first, and each one's text by the server's tokenizer.

        A text is None if the server returns none. Raises the same errors as ``score``.
        """
        positions = self._positions(await self._ask(ids_S, num_ids))
        record = _record(positions, ids_S, num_prompt=1, num_ids=num_ids)
        texts = [
            found[str(token)].get("decoded_token")
            for found, token in zip(positions[1:], ids_S[1:].tolist(), strict=True)
        ]
        return record, [text if isinstance(text, str) else None for text in texts]

    def _read(self, body: bytes, ids_S: np.ndarray, *, num_prompt: int, num_ids: int) -> TeacherRecord:
        """Parse the record in a reply, outside of the event loop's thread: a long response has many MiB."""
        return _record(self._positions(body), ids_S, num_prompt=num_prompt, num_ids=num_ids)

    async def _ask(self, ids_S: np.ndarray, num_ids: int) -> bytes:
        """Request the scores; return the body of the reply."""
        largest = FIXED_BYTES + BYTES_PER_ID * (num_ids + 1) * len(ids_S)
        reply = self._client.sdk.completions.with_streaming_response.create(
            model=self._section.model,
            prompt=cast("Any", ids_S.tolist()),
            max_tokens=1,
            temperature=1.0,
            extra_body={"prompt_logprobs": num_ids},
        )
        try:
            return await self._client.read(reply, max_bytes=largest)
        except EndpointDown as error:
            reason = f"{self._where}: {error.reason}"
            raise RewardUnavailable(reason, error.retry_after_s or RETRY_AFTER_S) from None
        except EndpointRefuses as error:
            raise TeacherRefuses(f"{self._where}: {error.reason}") from None
        except ReplyTooLong:
            raise TeacherRefuses(f"{self._where} sent more than {largest:,} bytes") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @property
    def _where(self) -> str:
        return f"{self._section.model} at {self._section.base_url}"

    def _positions(self, body: bytes) -> list[Any]:
        try:
            # The parser is C, and lets other threads run only when it calls Python.
            (choice,) = json.loads(body, object_hook=_as_it_is)["choices"]
            found = choice["prompt_logprobs"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise TeacherRefuses(f"{self._where} sent no completion with prompt_logprobs") from None
        if not isinstance(found, list):
            raise TeacherRefuses(f"{self._where} gives no prompt_logprobs; must be a server of vLLM")
        return found


def _record(positions: list[Any], ids_S: np.ndarray, *, num_prompt: int, num_ids: int) -> TeacherRecord:
    if len(positions) != len(ids_S):
        raise WrongTeacherRecord(f"the teacher scored {len(positions)} positions; must be {len(ids_S)}")
    num_tokens = len(ids_S) - num_prompt
    logprobs_T = np.empty(num_tokens, np.float32)
    ids_TK = np.empty((num_tokens, num_ids), np.int32)
    topk_TK = np.empty((num_tokens, num_ids), np.float32)
    for place in range(num_prompt, len(ids_S)):
        token, row = int(ids_S[place]), place - num_prompt
        try:
            found = {
                int(name): (int(one["rank"]), float(one["logprob"])) for name, one in positions[place].items()
            }
        except (AttributeError, LookupError, TypeError, ValueError):
            raise WrongTeacherRecord(f"the teacher gave no log-probabilities at position {place}") from None
        if token not in found:
            raise WrongTeacherRecord(f"the teacher did not score token {token} at position {place}")
        logprobs_T[row] = _finite(found[token][1])
        if len(found) == num_ids + 1:
            # The token itself is not among the likeliest, though a tie can give it one of their ranks.
            del found[token]
        likeliest = sorted((rank, one, value) for one, (rank, value) in found.items())
        if [rank for rank, _, _ in likeliest] != list(range(1, num_ids + 1)):
            raise WrongTeacherRecord(
                f"the teacher did not give the {num_ids} likeliest ids at position {place}"
            )
        ids_TK[row] = [one for _, one, _ in likeliest]
        topk_TK[row] = [_finite(value) for _, _, value in likeliest]
    # The weights of a server do not change, so there is only version 0.
    versions_T = np.zeros(num_tokens, np.int32)
    return TeacherRecord(logprobs_T=logprobs_T, ids_TK=ids_TK, topk_TK=topk_TK, versions_T=versions_T)


def _as_it_is(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _finite(value: float) -> float:
    """Return the value, or nan for the placeholder of minus infinity; a record with nan is refused."""
    return value if value > STANDS_FOR_MINUS_INFINITY else math.nan
