"""The events in which an item of the Responses API is streamed."""

from collections.abc import Iterator

from forgeasync.environments.sessions.fields import Json
from forgeasync.environments.sessions.inference import pieces


def item_events(index: int, item: Json) -> Iterator[tuple[str, Json]]:
    """Yield type and data of the events that build the item at this index of the output."""
    place = {"output_index": index}
    kind = item["type"]
    if kind == "function_call":
        bare = {**item, "arguments": "", "status": "in_progress"}
    elif kind == "message":
        bare = {**item, "content": [], "status": "in_progress"}
    else:
        bare = {**item, "content": []}
    yield "response.output_item.added", {**place, "item": bare}
    if kind == "function_call":
        yield from _arguments({**place, "item_id": item["id"]}, item["arguments"])
    else:
        for number, part in enumerate(item["content"]):
            yield from _part({**place, "item_id": item["id"], "content_index": number}, part)
    yield "response.output_item.done", {**place, "item": item}


def _arguments(place: Json, arguments: str) -> Iterator[tuple[str, Json]]:
    for piece in pieces(arguments):
        yield "response.function_call_arguments.delta", {**place, "delta": piece}
    yield "response.function_call_arguments.done", {**place, "arguments": arguments}


def _part(place: Json, part: Json) -> Iterator[tuple[str, Json]]:
    # The last part of the type is what the events are called: response.output_text.delta.
    kind = f"response.{part['type']}"
    extra = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"{kind}.delta", {**place, "delta": piece, **extra}
    yield f"{kind}.done", {**place, "text": part["text"], **extra}
    yield "response.content_part.done", {**place, "part": part}
