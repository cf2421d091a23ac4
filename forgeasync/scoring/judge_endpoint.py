"""One request to a judge's endpoint."""

import json
from collections.abc import Sequence
from typing import Any, cast

from forgeasync.config import JudgeReward
from forgeasync.scoring.endpoint_client import EndpointClient, ReplyTooLong
from forgeasync.scoring.judge_prompt import JudgeVerdict, MalformedVerdict, read_verdict, verdict_schema

MAX_BODY_BYTES = 1 << 20
"""A longer reply is not read."""


class JudgeEndpoint:
    """The endpoint of a judge; for one event loop."""

    def __init__(self, section: JudgeReward) -> None:
        """Connect to nothing. Raises ValueError where the variable with the key is not set."""
        self._section = section
        self._client = EndpointClient(
            base_url=section.base_url,
            model=section.model,
            api_key_env=section.api_key_env,
            limit_s=section.limit_s,
        )

    async def ask(self, messages: Sequence[dict[str, str]]) -> JudgeVerdict:
        """Return one verdict.

        Raises:
            EndpointDown, EndpointRefuses: as ``EndpointClient.read``.
            MalformedVerdict: the answer is no verdict.
        """
        section = self._section
        reply = self._client.sdk.chat.completions.with_streaming_response.create(
            model=section.model,
            messages=cast("Any", messages),
            temperature=section.temperature,
            max_tokens=section.max_reply_tokens,
            response_format=cast("Any", verdict_schema()),
        )
        try:
            body = await self._client.read(reply, max_bytes=MAX_BODY_BYTES)
        except ReplyTooLong:
            raise MalformedVerdict(f"comes in a reply of more than {MAX_BODY_BYTES} bytes") from None
        return read_verdict(_content(body), section)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


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
