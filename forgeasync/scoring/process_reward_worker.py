"""Process with the engine of a process reward model. JSON lines as in ``reward_worker``.

Started by ``forgeasync.scoring.reward_pool`` as ``python -m forgeasync.scoring.process_reward_worker``. It is
separate from the scorer's process, because a forward pass would delay the heartbeat of the scorer's event
loop, and because an engine that dies can be replaced alone.

    {"reward": {...}}                                  ->  {"is_async": true, "version": "..."}
                                                         or {"refused": "<reason>"}
    {"call": 7, "task": {...}, "responses": [{...}]}   ->  {"call": 7, "scores": [{...}]}
                                                         or {"call": 7, "error": "<reason>"}

One thread reads requests and the main thread steps the engine. Requests that arrive during a step are in the
next one.
"""

import dataclasses
import hashlib
import json
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forgeasync.config import ProcessRewardModel
from forgeasync.environments import Response
from forgeasync.generator import ProcessRewardEngine, ScoredTags
from forgeasync.isolation import open_channel, write_line
from forgeasync.rollouts import FinishReason, Score, ScoreStatus
from forgeasync.scoring.process_rewards import (
    StepTokenizer,
    WrittenSteps,
    score_of_steps,
    score_without_steps,
    steps_of_response,
)
from forgeasync.scoring.reward_worker import MAX_REASON_CHARS, decode_response

END_BYTES = 1 << 20
"""Bytes at the end of each file of weights that are included in the model's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCall:
    """Response whose steps are in the engine."""

    response: Response
    steps: WrittenSteps
    counted_tags: tuple[int, ...]


class StepScoring:
    """Scores responses with a tokenizer and an engine. For one thread."""

    def __init__(self, section: ProcessRewardModel) -> None:
        """Load the model and score a made-up text.

        Raises:
            ValueError: The model gives no scores.
        """
        self._section = section
        self._tokenizer = StepTokenizer(section)
        self._engine = ProcessRewardEngine(section, tag_id=self._tokenizer.tag_id)
        self._pending: dict[str, _PendingCall] = {}
        trial = Response("1", 1, FinishReason.STOP)
        if self.begin("trial", "1", trial) is None:
            while self._engine.has_work:
                for _, result in self.step():
                    if isinstance(result, str):
                        raise ValueError(result)

    @property
    def has_work(self) -> bool:
        """Whether a response is not scored yet."""
        return self._engine.has_work

    def begin(self, call: str, prompt: str, response: Response) -> Score | None:
        """Add a response to the engine; return its score if the engine is not needed."""
        steps = steps_of_response(response, self._section)
        if not steps.whole:
            return score_without_steps(response)
        tagged = self._tokenizer.tagged(prompt, [step.text for step in steps.whole])
        if len(tagged.ids) > self._section.max_context_length:
            return score_without_steps(response, status=ScoreStatus.OVERSIZED)
        self._pending[call] = _PendingCall(response=response, steps=steps, counted_tags=tagged.counted_tags)
        self._engine.add(call, tagged.ids)
        return None

    def step(self) -> list[tuple[str, Score | str]]:
        """Run one step of the engine; return the score, or why there is none, of each finished call."""
        return [(scored.request_id, self._result(scored)) for scored in self._engine.step()]

    def _result(self, scored: ScoredTags) -> Score | str:
        call = self._pending.pop(scored.request_id)
        if scored.problem is not None:
            return f"the model {scored.problem}"
        values = [scored.values[place] for place in call.counted_tags]
        return score_of_steps(call.response, call.steps, values, self._section)


def model_version(section: ProcessRewardModel) -> str:
    """Return a digest of the section and of the model's files (of weights: only sizes and last bytes)."""
    folder = Path(section.model_path)
    digest = hashlib.sha256(section.model_dump_json(exclude={"model_path", "weight", "name"}).encode())
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            if file.suffix == ".safetensors":
                opened.seek(max(0, size - END_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:12]


def _read_into(requests: IO[bytes], waiting: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in requests:
        waiting.put(json.loads(line))
    # The parent has gone, so nothing waits for the remaining results.
    os._exit(0)


def _begin(scoring: StepScoring, request: dict[str, Any], replies: IO[bytes]) -> None:
    call = request["call"]
    (response,) = map(decode_response, request["responses"])
    try:
        score = scoring.begin(str(call), request["task"]["prompt"], response)
    except ValueError as error:
        write_line(replies, {"call": call, "error": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]})
        return
    if score is not None:
        write_line(replies, {"call": call, "scores": [dataclasses.asdict(score)]})


def _answer(scoring: StepScoring, waiting: "queue.SimpleQueue[dict[str, Any]]", replies: IO[bytes]) -> None:
    """Answer requests until stdin ends, which ends the process."""
    while True:
        while not waiting.empty() or not scoring.has_work:
            _begin(scoring, waiting.get(), replies)
        for call, result in scoring.step():
            reply = {"error": result} if isinstance(result, str) else {"scores": [dataclasses.asdict(result)]}
            write_line(replies, {"call": int(call), **reply})


def serve() -> None:
    """Load the model of the first request, and answer requests until stdin ends."""
    requests, replies = open_channel()
    section = ProcessRewardModel.model_validate(json.loads(requests.readline())["reward"])
    try:
        scoring = StepScoring(section)
        version = model_version(section)
    except Exception as error:  # any type: vLLM raises many, and the run must report the reason
        reason = f"cannot be started: {type(error).__name__}: {' '.join(str(error).split())}"
        write_line(replies, {"refused": reason[:MAX_REASON_CHARS]})
        return
    write_line(replies, {"is_async": True, "version": version})
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=[requests, waiting], daemon=True).start()
    _answer(scoring, waiting, replies)


if __name__ == "__main__":
    serve()
