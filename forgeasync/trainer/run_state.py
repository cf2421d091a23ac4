"""The controller's state in a checkpoint, and the check whether a run may be resumed from it.

Of the config only what the past of the run follows from must stay as it was: the data and their order, random
seeds, the model's shape and its adapters. Everything else may change on resuming: rewards, parallel layout
and dtypes, learning rate and schedule, the loss, batch sizes, age limits and buffer, generators, max_steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forgeasync.buffer import BufferSnapshot, CheckpointedBuffer, LedgerPosition
from forgeasync.config import ModelFacts, RunConfig
from forgeasync.schema import Problem
from forgeasync.trainer.folders import RUN_FILE

UNCHANGEABLE = {
    "seed": "the order of the data and all random draws follow from it",
    "data": "the place in the data's order would mean other problems",
    "lora": "the checkpoint holds what this setting trains",
}
"""Sections and fields that a resumed run has to keep, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's part of a checkpoint."""

    step: int
    """Steps made; the version of the policy too."""
    elapsed_s: float
    model: dict[str, object]
    """The model's shape, by ``model_shape``."""
    config: dict[str, object]
    problems: str
    """Digest of the training problems in their order."""
    buffer: BufferSnapshot
    ledger: LedgerPosition
    """The run's ledger, which is on the disk up to here."""

    def encode(self) -> bytes:
        """Encode the state as the text of ``run.json``."""
        return msgspec.json.format(msgspec.json.encode(self))

    @property
    def checkpointed_buffer(self) -> CheckpointedBuffer:
        return CheckpointedBuffer(snapshot=self.buffer, ledger=self.ledger)


def model_shape(facts: ModelFacts) -> dict[str, object]:
    """Return a model's facts as they come back from ``run.json``."""
    return msgspec.json.decode(msgspec.json.encode(facts))


def read_run_state(folder: Path) -> RunState:
    """Return the controller's part of the checkpoint in ``folder``.

    Raises:
        ValueError: the file is damaged, or of another version of this package.
    """
    try:
        return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunState)
    except msgspec.MsgspecError as error:
        raise ValueError(f"--resume: {folder / RUN_FILE} cannot be read: {error}") from None


def check_resumable(state: RunState, folder: Path, config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Find what prevents a run with this config and model from being resumed from the checkpoint."""
    for field, saved, now in differences(state.model, model_shape(facts)):
        yield Problem(
            field="--resume",
            value=str(folder),
            remedy=f"is a checkpoint of another model: {field} is {saved} there, {now} at "
            f"model.path = {config.model.path!r}",
        )
    current = config.model_dump(mode="json")
    for field, reason in UNCHANGEABLE.items():
        before, after = state.config.get(field), current[field]
        if field == "data":
            before, after = data_order(before), data_order(after)
        for path, saved, now in differences({field: before}, {field: after}):
            yield Problem(field=path, value=now, remedy=f"must be {saved!r} as in {folder}: {reason}")
    if config.max_steps < state.step:
        yield Problem(
            field="max_steps",
            value=config.max_steps,
            remedy=f"must be at least {state.step}, the steps that {folder} has behind it",
        )


def check_problems(state: RunState, folder: Path, problems: str) -> Iterator[Problem]:
    """Find whether the training problems, by their digest, are others than the checkpoint's run has trained
    on.

    A file can have other content under the name that the config says.
    """
    if state.problems != problems:
        remedy = f"has become other data: the source must have {state.problems}, as in {folder}"
        yield Problem(field="data", value=problems, remedy=f"{remedy}: {UNCHANGEABLE['data']}")


_NOT_ORDER = frozenset({"reward", "renderer"})
"""Keys of the section that may change on resuming: they do not affect the data's order."""


def data_order(data: object) -> object:
    """Return the part of the section ``data`` that the order of the data follows from."""
    if isinstance(data, Mapping):
        return {key: data_order(value) for key, value in data.items() if key not in _NOT_ORDER}
    return [data_order(one) for one in data] if isinstance(data, list) else data


def differences(
    saved: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name of each value that differs, with both values; sections are compared key by
    key."""
    for key in sorted(saved.keys() | now.keys()):
        one, other = saved.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}", one, other
