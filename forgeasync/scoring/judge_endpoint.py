"""One request to a judge's endpoint, and what its failures mean."""

import json
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, cast

import openai

from forgeasync.config.judge import JudgeReward
from forgeasync.environments.endpoint import EndpointModel
from forgeasync.scoring.judge_prompt import MalformedVerdict, read_verdict, verdict_schema

MAX_BODY_BYTES = 1 << 20
"""A longer reply is not read."""

MAX_RETRY_AFTER_S = 300.0
"""More is not believed of a Retry-After."""


class EndpointDown(Exception):
    """The endpoint has not answered, or says that it cannot now. It says nothing of the response."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is what the endpoint asks for; 0 where it asks for nothing."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EndpointRefuses(Exception):
    """The endpoint has refused the request itself: a wrong key, model or URL, or a request it cannot take."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status


class JudgeEndpoint:
    """The endpoint of a judge; for one event loop."""

    def __init__(self, section: JudgeReward) -> None:
        """Connect to nothing. Raises ValueError where the variable with the key is not set."""
        self._section = section
        model = EndpointModel(
            base_url=section.base_url, model=section.model, api_key_variable=section.api_key_env
        )
        self._client = openai.AsyncOpenAI(
            base_url=section.base_url, api_key=model.api_key(), timeout=section.limit_s, max_retries=0
        )

    async def ask(self, messages: Sequence[dict[str, str]]) -> float:
        """Return the points of one verdict.

        Raises:
            EndpointDown: there was no answer within ``limit_s``, or one with status 429 or 5xx.
            EndpointRefuses: another status.
            MalformedVerdict: the answer is no verdict.
        """
        section = self._section
        body = b""
        try:
            async with self._client.chat.completions.with_streaming_response.create(
                model=section.model,
                messages=cast("Any", messages),
                temperature=section.temperature,
                max_tokens=section.max_reply_tokens,
                response_format=cast("Any", verdict_schema()),
            ) as response:
                async for part in response.iter_bytes():
                    body += part
                    if len(body) > MAX_BODY_BYTES:
                        raise MalformedVerdict(f"comes in a reply of more than {MAX_BODY_BYTES} bytes")
        except openai.APIStatusError as error:
            reason = f"status {error.status_code}: {' '.join(error.message.split())[:300]}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                wait_s = retry_after_s(error.response.headers.get("retry-after"))
                raise EndpointDown(reason, wait_s) from None
            raise EndpointRefuses(reason, error.status_code) from None
        except openai.APITimeoutError:
            raise EndpointDown(f"no answer within limit_s = {section.limit_s:g} s", 0.0) from None
        except openai.APIConnectionError as error:
            raise EndpointDown(f"no connection: {error.__cause__ or error}", 0.0) from None
        return read_verdict(_content(body), section)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def retry_after_s(header: str | None) -> float:
    """Return the seconds that a Retry-After asks for (RFC 9110, 10.2.3); 0 where it says nothing usable."""
    if header is None or len(header) > 100:
        return 0.0
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - time()
        except (ValueError, OverflowError):
            return 0.0
    # Also what is not a number.
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s > 0.0 else 0.0


def _content(body: bytes) -> object:
    """The text of a chat completion. Raises MalformedVerdict where the reply is none, or was cut off."""
    try:
        (choice, *_) = json.loads(body)["choices"]
        if choice.get("finish_reason") == "length":
            raise MalformedVerdict("was cut off at max_reply_tokens")
        return choice["message"]["content"]
    except MalformedVerdict:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise MalformedVerdict(f"comes in no chat completion: {body[:100]!r}") from None
