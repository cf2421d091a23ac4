"""The record of a run with ``record_execution``, from which apps.reexecute executes the run again.

The record is ``execution.jsonl`` with the files of all groups that trained (``payloads/``). The file of a
group has every token with the policy version and the request that sampled it, its experts and kept set, and
the scores. A line of ``execution.jsonl`` has the groups of a step with their weights, and the step's loss and
gradient norm; another one has the digest of the weights after it. Everything else follows from the config.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from forgeasync.files import JsonLines, whole_lines

FORMAT = 2
"""Version of the lines' format, which the first line states."""


class _Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun", tag_field="event"):
    """First line, and first line after each resumption."""

    step: int
    format: int
    machine: str
    kernels: str


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    """A step of a run, with what must be equal when it is made again."""

    step: int
    draws: tuple[int, ...]
    """``Group.draw_id`` of each group of the batch, in order."""
    weights: tuple[float, ...]
    """Weight of each group in the batch."""
    loss: float | None
    """None if the step was skipped before it had one."""
    grad_norm: float | None
    skip_reason: str | None = None


class _Published(msgspec.Struct, frozen=True, kw_only=True, tag="published", tag_field="event"):
    """The weights after a step were published."""

    step: int
    digest: str


_DECODER: msgspec.json.Decoder[_Begun | RecordedStep | _Published] = msgspec.json.Decoder(
    _Begun | RecordedStep | _Published
)


def machine_name() -> str:
    """Return the model of this machine's processor, on which bits of float32 sums depend."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = (line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
        return next(models, platform.machine())


class ExecutionLog:
    """Writes ``execution.jsonl``."""

    def __init__(self, path: Path, *, step: int, kernels: str) -> None:
        """Append to ``path``; the run continues after ``step``. ``kernels`` is the machine's digest."""
        self.lines = JsonLines(path)
        self._write(_Begun(step=step, format=FORMAT, machine=machine_name(), kernels=kernels))

    def trained(self, step: RecordedStep) -> None:
        """Record a step."""
        self._write(step)

    def published(self, version: int, digest: str) -> None:
        """Record the weights of a version, as ``Manifest.digest``."""
        self._write(_Published(step=version, digest=digest))

    def _write(self, line: msgspec.Struct) -> None:
        self.lines.append(msgspec.to_builtins(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Everything that ``execution.jsonl`` says of a run."""

    steps: dict[int, RecordedStep]
    digests: dict[int, str]
    """Digest of the weights by version; versions that were not published are missing."""
    machine: str
    """Processor of the run's machine."""
    kernels: str
    """Digest of what that machine's kernels compute (``models.kernel_digest``)."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the lines of a run.

        Raises:
            FileNotFoundError: The run has no record.
            ValueError: A line cannot be read by this version.
        """
        steps, digests, machine, kernels = {}, {}, "", ""
        for number, line in enumerate(whole_lines(path), start=1):
            try:
                match _DECODER.decode(line):
                    case _Begun(format=version) as begun:
                        if version != FORMAT:
                            raise ValueError(f"it has format {version}; must have {FORMAT}")
                        machine, kernels = begun.machine, begun.kernels
                    case RecordedStep() as recorded:
                        steps[recorded.step] = recorded
                    case _Published() as published:
                        digests[published.step] = published.digest
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"line {number} cannot be read by this version: {error}") from None
        return cls(steps=steps, digests=digests, machine=machine, kernels=kernels)


def recorded_draws(path: Path) -> frozenset[int]:
    """Return the draws of all groups that trained, by ``execution.jsonl``; none if it does not exist."""
    if not path.exists():
        return frozenset()
    return frozenset(draw for step in Execution.read(path).steps.values() for draw in step.draws)
