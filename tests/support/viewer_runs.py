"""Folders of runs for the viewer, as a run writes them: of any length, and without running anything."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from forgeasync.buffer import (
    AnyEvent,
    Checkpointed,
    Dropped,
    DropReason,
    Ended,
    Resumed,
    Sampled,
    Scored,
    Started,
    Submitted,
    Trained,
    Update,
)
from forgeasync.observability import METRICS, Alive, Changed, Facts, Line, Opened, Span, State, encode
from forgeasync.plugins.viewer import RunReader, application
from tests.support.ledgers import ledger_text, opened

STEP_S = 2.0
"""Seconds of every step."""

KEYS = tuple(metric.key for metric in METRICS if not metric.is_pattern)


def read(folder: Path) -> RunReader:
    """Read a run's folder to its end."""
    reader = RunReader(folder)
    reader.read_all()
    return reader


def asked(runs: Sequence[RunReader], path: str, **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON that a server of these runs answers."""

    async def ask() -> tuple[int, Any]:
        async with TestClient(TestServer(application(runs))) as client:
            response = await client.get(path, headers=headers)
            return response.status, await response.json()

    return asyncio.run(ask())


def write_run(
    folder: Path,
    *,
    num_steps: int,
    seed: int = 0,
    is_ended: bool = True,
) -> Path:
    """Write a run without faults that has ended, or one whose last groups are still in flight.

    Two groups of two train in each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    max_steps = num_steps if is_ended else 2 * num_steps
    (folder / "config.yaml").write_text(
        f"name: made\nseed: {seed}\nmax_steps: {max_steps}\nrun_dir: {folder}\nmodel:\n  path: models/x\n"
    )
    events = [one for step in ledger_of_steps(num_steps, 2, is_ended=is_ended) for one in step]
    (folder / "ledger.jsonl").write_bytes(ledger_text(events))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(metrics_of(step, seed)) + "\n")
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            for group in (2 * step - 2, 2 * step - 1):
                for episode in range(2):
                    file.write(json.dumps(rollout_of(step, group, episode, "#4")) + "\n")
    return folder


def metrics_of(step: int, seed: int = 0) -> dict[str, float | None]:
    """A step's line with every metric that has a name of its own."""
    values: dict[str, float | None] = {key: 1.0 / (step + seed + 1) for key in KEYS}
    return values | {"step": step, "policy_version": step, "time/elapsed_s": STEP_S * step, "loss": None}


def rollout_of(step: int, group: int, episode: int, text: str) -> dict[str, object]:
    """A rollout's line, with its keys in the order in which a run writes them."""
    return {
        "step": step,
        "group_id": group,
        "episode": episode,
        "agent": 0,
        "task_id": f"sums/{group}",
        "prompt": "2 + 2 =",
        "response": text,
        "answer": "4",
        "reward": 1.0,
        "version_spans": [[max(0, step - 2), 0, 3], [step - 1, 3, 4]],
        "prompt_tokens": 5,
        "response_tokens": 4,
        "finish_reason": "stop",
        "is_correct": True,
        "steps": [],
    }


def tokens_of(step: int, group: int, episode: int, pieces: list[object]) -> dict[str, object]:
    """A rollout's line of tokens.jsonl: all tokens but the first are trained, the third has no mismatch."""
    num_trained = len(pieces) - 1
    numbers: list[float | None] = [0.25 * (index - 1) for index in range(num_trained)]
    if num_trained > 1:
        numbers[1] = None
    column = {
        name: list(numbers) for name in ("logprob", "behavior", "mismatch", "ratio", "advantage", "entropy")
    }
    branch = {
        "branch": 0,
        "num_tokens": len(pieces),
        "pieces": pieces,
        "positions": list(range(1, len(pieces))),
        **column,
        "version": [step - 1] * num_trained,
        "kept": [index % 3 for index in range(num_trained)],
        "disagreement": ["01-"[index % 3] * num_trained for index in range(2)],
    }
    return {"step": step, "group_id": group, "episode": episode, "agent": 0, "branches": [branch]}


def worst_of(step: int, places: list[tuple[int, int, int]], piece: object) -> dict[str, object]:
    """A step's line of tokens.jsonl with tokens at (group, episode, position), the worst first."""
    worst = [
        {
            "group_id": group,
            "episode": episode,
            "agent": 0,
            "branch": 0,
            "position": position,
            "piece": piece,
            **dict.fromkeys(("logprob", "behavior", "mismatch", "ratio", "advantage", "entropy"), -1.5),
            "version": step - 1,
            "kept": 0,
            "disagreement": ["1", "0"],
        }
        for group, episode, position in places
    ]
    return {"step": step, "worst": worst}


def ledger_of_steps(num_steps: int, groups_per_step: int, *, is_ended: bool) -> Iterator[list[AnyEvent]]:
    """The events of each step; a group's prompt has its number. Groups start a step before they train."""
    yield [opened(groups_per_step), *_begun(0, groups_per_step)]
    for step in range(1, num_steps + 1):
        own = range((step - 1) * groups_per_step, step * groups_per_step)
        finished: list[AnyEvent] = [event for one in own for event in finished_group(one)]
        has_next = step < num_steps or not is_ended
        yield [*finished, *(_begun(step, groups_per_step) if has_next else []), trained(step, own)]
    if is_ended:
        yield [Ended(unfinished=())]


def _begun(step: int, groups_per_step: int) -> list[AnyEvent]:
    own = range(step * groups_per_step, (step + 1) * groups_per_step)
    return [event for one in own for event in begun_group(one)]


def begun_group(number: int) -> list[AnyEvent]:
    """A prompt that is submitted and started, as the group of its number."""
    submitted = Submitted(prompt=number, source="sums", task_id=f"sums/{number}")
    return [submitted, Started(prompt=number, attempt=0, group=number)]


def finished_group(number: int) -> list[AnyEvent]:
    """The rest of a group's way to the trainer."""
    return [Sampled(prompt=number, group=number), Scored(prompt=number, group=number)]


def trained(step: int, numbers: range) -> Trained:
    """A batch of the groups of some prompts."""
    return Trained(step=step, prompts=tuple(numbers), groups=tuple(numbers), update=Update.MADE)


def eventful_ledger() -> list[AnyEvent]:
    """One group a step. 0 is trained; 1 is lost and comes again as 2, which is trained; then the run dies and
    is resumed from the checkpoint after step 1: 2 and 3 are undone, and come again under their numbers."""
    return [
        opened(1),
        *begun_group(0),
        *finished_group(0),
        *begun_group(1),
        trained(1, range(0, 1)),
        Dropped(prompt=1, group=1, reason=DropReason.LOST, again=True),
        Checkpointed(step=1),  # line 10
        Started(prompt=1, attempt=1, group=2),
        Sampled(prompt=1, group=2),
        Scored(prompt=1, group=2),
        Submitted(prompt=2, source="sums", task_id="sums/2"),
        Started(prompt=2, attempt=0, group=3),
        Trained(step=2, prompts=(1,), groups=(2,), update=Update.MADE),
        Resumed(step=1, line=10, groups_per_step=1, batches=((1,),)),  # line 17
        Started(prompt=1, attempt=1, group=2),
        Submitted(prompt=2, source="sums", task_id="sums/2"),
        Started(prompt=2, attempt=0, group=3),
        Sampled(prompt=1, group=2),
        Scored(prompt=1, group=2),
        Trained(step=2, prompts=(1,), groups=(2,), update=Update.SKIPPED),
        Sampled(prompt=2, group=3),
    ]


TRACE_BEGIN_S = 1.8e9
"""When the first process of ``write_traces`` began, in seconds since 1970; steps follow 10 s later."""


def write_traces(folder: Path, *, num_steps: int) -> None:
    """Write traces of the controller, and of a generator that was killed and came back, into a run."""
    loop: list[Line] = [_opened("controller", 1, 0.0), _changed(10.0, State.COMPUTING)]
    for step in range(1, num_steps + 1):
        begin_s = 10.0 + STEP_S * (step - 1)
        loop += [_changed(begin_s, State.WAITING_FOR_BATCH), _changed(begin_s + 0.5, State.COMPUTING)]
        loop.append(_span(begin_s, 0.5, "wait for a batch", {"step": step}))
        loop.append(_span(begin_s + 0.5, 1.5, "train", {"step": step}))
        loop.append(_span(begin_s + STEP_S, 0.0, "record", {"step": step}))
    end_s = 10.0 + STEP_S * num_steps
    first = [
        _opened("generator-0", 2, 1.0),
        _changed(4.0, State.COMPUTING),
        _span(4.0, 5.0, "sample group", {"group": 0}),
        _span(6.0, 5.0, "sample group", {"group": 1}),
        Alive(at_s=TRACE_BEGIN_S + 11.0, num_lost=0),
    ]
    second = [_opened("generator-0", 3, 12.0), _changed(13.0, State.WAITING_FOR_ROOM)]
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for name, lines in (("controller-1", loop), ("generator-0-2", first), ("generator-0-3", second)):
        last = Alive(at_s=TRACE_BEGIN_S + end_s, num_lost=0)
        written = lines if name == "generator-0-2" else [*lines, last]
        (logs / f"{name}.trace.jsonl").write_bytes(b"".join(map(encode, written)))


def _opened(proc: str, pid: int, at_s: float) -> Line:
    return Opened(at_s=TRACE_BEGIN_S + at_s, proc=proc, pid=pid, host="here", state=State.STARTING)


def _changed(at_s: float, state: State) -> Line:
    return Changed(at_s=TRACE_BEGIN_S + at_s, state=state)


def _span(at_s: float, took_s: float, name: str, facts: Facts) -> Line:
    return Span(begin_s=TRACE_BEGIN_S + at_s, took_s=took_s, name=name, facts=facts)
