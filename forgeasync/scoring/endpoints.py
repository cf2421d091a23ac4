"""Requests to OpenAI-compatible endpoints: bounded replies, kinds of failures, and a circuit breaker.

``TeacherClient`` gets a teacher's log-probabilities of given tokens from vLLM's server.

``CircuitBreaker`` is pure. It decides whether a request may be made:

    closed ──`MAX_FAILURES` in a row─► open ──after a wait──► half open ──success──► closed
                                          ▲                        │
                                          └─────── failure ────────┘ the wait doubles

While it is open no request is made, so an endpoint that is down is not flooded. While it is half open, one
call tests the endpoint.

Shape suffixes: S tokens of prompt and response, T response tokens, K ids of each token.
"""

import asyncio
import json
import math
from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, cast

import numpy as np

from forgeasync.config import JudgeReward, TeacherEndpoint
from forgeasync.environments import EndpointModel, open_client
from forgeasync.rollouts import TeacherRecord, WrongTeacherRecord

RETRY_AFTER_S = 1.0
"""Seconds until an endpoint that does not answer is tried again, if it gives no Retry-After."""


class RewardUnavailable(Exception):
    """The reward cannot score at the moment: a server is down, or its rate limit is reached.

    This is not a property of the response. No attempt is counted; the response is scored later.
    """

    def __init__(self, reason: str, requested_s: float = 0.0) -> None:
        """``requested_s`` is the wait that the server asks for, in seconds; 0 if it asks for none."""
        super().__init__(reason, requested_s)
        self.reason = reason
        self.requested_s = requested_s
        self.retry_after_s = requested_s or RETRY_AFTER_S
        """Seconds after which a retry makes sense."""

    def __str__(self) -> str:
        return self.reason


MAX_FAILURES = 4
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 15.0


class CircuitBreaker:
    """Circuit breaker of an endpoint. Times are in seconds of one clock, which the caller reads."""

    def __init__(self) -> None:
        """Start closed."""
        self._in_a_row = 0
        self._wait_s = 0.0
        self._open_until_s: float | None = None
        self._is_probing = False

    def begin(self, now_s: float) -> float | None:
        """Return None if a call may begin, otherwise the seconds after which a retry makes sense.

        After None, the caller must call ``succeeded``, ``failed`` or ``abandoned``.
        """
        if self._open_until_s is None:
            return None
        if now_s < self._open_until_s:
            return self._open_until_s - now_s
        if self._is_probing:
            return FIRST_WAIT_S
        self._is_probing = True
        return None

    def succeeded(self) -> None:
        """Record that the endpoint has answered."""
        self._in_a_row, self._open_until_s, self._is_probing, self._wait_s = 0, None, False, 0.0

    def failed(self, now_s: float, *, retry_after_s: float = 0.0) -> None:
        """Record that the endpoint did not answer or is unavailable, with its Retry-After if it gave one."""
        self._in_a_row += 1
        if self._open_until_s is None and self._in_a_row < MAX_FAILURES and not retry_after_s:
            return
        if self._open_until_s is None or self._is_probing:
            self._wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2.0 * self._wait_s))
        self._is_probing = False
        until_s = now_s + max(self._wait_s, retry_after_s)
        self._open_until_s = max(until_s, self._open_until_s or until_s)

    def abandoned(self) -> None:
        """Record that a call was cancelled, which says nothing about the endpoint."""
        self._is_probing = False


MAX_RETRY_AFTER_S = 300.0
"""Upper bound of an accepted Retry-After, in seconds."""


class EndpointRefuses(ValueError):
    """The endpoint has refused the request, or its reply is not what was asked for."""

    def __init__(self, reason: str, status: int = 200) -> None:
        """``status`` is that of the reply."""
        super().__init__(reason)
        self.status = status


class EndpointClient:
    """Client of the endpoint that a section names; for one event loop."""

    def __init__(self, section: JudgeReward | TeacherEndpoint) -> None:
        """Read the key, without connecting.

        Raises:
            ValueError: The environment variable with the key is not set.
        """
        endpoint = EndpointModel(
            base_url=section.base_url,
            model=section.model,
            api_key_variable=section.api_key_env,
            max_retries=0,
        )
        self._limit_s = section.limit_s
        self._where = f"{section.model} at {section.base_url}"
        self.sdk = open_client(endpoint, limit_s=section.limit_s)
        """SDK client, configured without retries."""

    async def read(self, reply: AbstractAsyncContextManager[Any], *, max_bytes: int) -> bytes:
        """Make a request and read its body; ``reply`` is a ``with_streaming_response`` call of the SDK.

        Raises:
            RewardUnavailable: There was no answer within ``limit_s``, or one with status 408, 409, 429 or
                5xx.
            EndpointRefuses: The answer has another error status, or more than ``max_bytes``.
        """
        # Imported here: the import takes half a second, and only requests need it.
        import openai

        body = bytearray()
        try:
            async with reply as response:
                async for part in response.iter_bytes():
                    body += part
                    if len(body) > max_bytes:
                        raise EndpointRefuses(f"{self._where} sent more than {max_bytes:,} bytes")
        except openai.APIStatusError as error:
            reason = f"{self._where}: status {error.status_code}: {' '.join(error.message.split())[:300]}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                wait_s = retry_after_s(error.response.headers.get("retry-after"))
                raise RewardUnavailable(reason, wait_s) from None
            raise EndpointRefuses(reason, error.status_code) from None
        except openai.APITimeoutError:
            reason = f"{self._where}: no answer within limit_s = {self._limit_s:g} s"
            raise RewardUnavailable(reason) from None
        except openai.APIConnectionError as error:
            raise RewardUnavailable(f"{self._where}: no connection: {error.__cause__ or error}") from None
        return bytes(body)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.sdk.close()


def retry_after_s(header: str | None) -> float:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3); 0 if it is not usable."""
    if header is None or len(header) > 100:
        return 0.0
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - time()
        except (ValueError, OverflowError):
            return 0.0
    # Also handles nan.
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s > 0.0 else 0.0


# ---- teachers

BYTES_PER_ID = 512
"""Bytes per id of the longest accepted reply, in addition to ``FIXED_BYTES``."""
FIXED_BYTES = 1 << 16

STANDS_FOR_MINUS_INFINITY = -9999.0
"""Value that vLLM's server writes for minus infinity, which JSON cannot represent."""


class TeacherClient:
    """Client of a teacher behind vLLM's OpenAI-compatible server; for one event loop.

    Tokens are sent and returned as ids, so nothing is re-tokenized. The fields are those of vLLM's extension
    of ``/v1/completions`` (vLLM 0.32, entrypoints/openai/completion/protocol.py); a probe before the run
    starts detects servers without it.
    """

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
            EndpointRefuses: Another error status, or the reply is not a completion with log-probabilities.
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
        return await self._client.read(reply, max_bytes=largest)

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
            raise EndpointRefuses(f"{self._where} sent no completion with prompt_logprobs") from None
        if not isinstance(found, list):
            raise EndpointRefuses(f"{self._where} gives no prompt_logprobs; must be a server of vLLM")
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
