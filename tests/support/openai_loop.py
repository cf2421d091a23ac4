"""An agent's loop as somebody else writes it: it knows the openai SDK and nothing of this project."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from openai import AsyncOpenAI


async def run_tool_loop(
    base_url: str,
    api_key: str,
    question: str,
    tools: Mapping[str, Callable[..., str]],
    schemas: list[dict[str, Any]],
    *,
    stream: bool,
) -> str:
    """Let the model call tools until it answers without one; returns that answer."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the tools. Answer with one word."},
        {"role": "user", "content": question},
    ]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(10):
            message = await (_streamed if stream else _whole)(client, messages, schemas)
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                function = call["function"]
                try:
                    result = tools[function["name"]](**json.loads(function["arguments"]))
                except (KeyError, TypeError, ValueError) as error:
                    result = f"error: {error!r}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise RuntimeError("the model never stopped calling tools")


async def _whole(client: AsyncOpenAI, messages: list[Any], schemas: list[Any]) -> dict[str, Any]:
    completion = await client.chat.completions.create(
        model="gpt-5", messages=messages, tools=schemas, temperature=0.2
    )
    return completion.choices[0].message.model_dump(exclude_none=True)


async def _streamed(client: AsyncOpenAI, messages: list[Any], schemas: list[Any]) -> dict[str, Any]:
    """Put together by hand, as many loops do."""
    text, calls = "", {}
    stream = await client.chat.completions.create(
        model="gpt-5", messages=messages, tools=schemas, stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index,
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] += part.id or ""
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
