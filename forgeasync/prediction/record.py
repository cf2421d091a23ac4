"""What was predicted of a run, as data, and its file: ``prediction.json`` in the run's folder."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from forgeasync.schema import ConfigError, Count, CountOrZero, Problem, Section

FORMAT_VERSION = 2

NUM_SIMULATED_STEPS = 30
"""Most steps of a run that are simulated; its start and its end are left out of the means."""

HOW_TO_PREDICT = (
    "python -m apps.profile with the run's --config and --out FILE measures a profile, and "
    "prediction.profile=FILE gives it to a run"
)
"""How a run gets predictions, in words."""

MAX_BYTES = 2**20

Number = Annotated[float, Field(ge=0.0, le=1e18)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(max_length=4096)]


class PredictedRun(Section):
    """Means over the steady steps of a simulated run."""

    step_s: Annotated[float, Field(gt=0.0, le=1e18)]
    """Seconds from when the trainer comes for a batch to when it comes for the next one."""
    trained_tokens_per_s: Number
    """Response tokens."""
    trainer_idle_share: Share
    """Share of the time in which the trainer waits for a batch."""
    generators_idle_share: Share
    """Share of the generators' time without a request."""
    mean_age: Number
    """Of the tokens trained on, in versions."""
    notes: tuple[Text, ...] = ()
    """What makes the prediction less certain."""

    @property
    def words(self) -> str:
        """One line."""
        return (
            f"{self.step_s:.3g} s a step, {self.trained_tokens_per_s:,.0f} tokens/s trained, trainer waits "
            f"{self.trainer_idle_share:.0%}, generators {self.generators_idle_share:.0%}, "
            f"mean age {self.mean_age:.1f}"
        )


class PredictedChange(Section):
    """One change of the run, simulated."""

    name: Text
    """Such as "one more replica"."""
    before_s: Number
    """Seconds a step without it."""
    after_s: Number

    @property
    def words(self) -> str:
        """What it brings."""
        return f"{self.name}: {self.before_s:.3g} -> {self.after_s:.3g} s a step"


class PredictedChanges(Section):
    """What single changes would bring."""

    verdict: Text
    """What bounds the run, and the change that helps most."""
    changes: tuple[PredictedChange, ...]
    """Those that bring most first."""


class PredictedSplit(Section):
    """The fastest split of the run's own GPUs."""

    overrides: Text
    """What it sets of the config, as on the command line."""
    own_tokens_per_s: Number
    """Response tokens trained on per second, by the split that the config has."""
    tokens_per_s: Number
    """By this one."""


class Prediction(Section):
    """The run simulated with the lengths of one time."""

    after_step: CountOrZero
    """The newest step whose groups the lengths are from; 0: those of the profile."""
    num_replicas: Count
    """That the run has."""
    run: PredictedRun
    changes: PredictedChanges | None = None
    """null: not simulated yet."""
    split: PredictedSplit | None = None
    """null: not simulated yet."""


class PredictionRecord(Section):
    """The file."""

    format_version: Literal[2] = FORMAT_VERSION
    profile: Text
    """The profile's file."""
    profile_of: Text
    """When and where it was measured."""
    start: Prediction
    """With the lengths of the profile."""
    newest: Prediction
    """With the lengths that were fitted last, of which everything has been simulated."""

    def with_news(self, found: Prediction) -> "PredictionRecord":
        """Return the record with a further prediction; one with newer lengths counts once it is whole."""
        if found.after_step == self.start.after_step:
            return self.model_copy(update={"start": found, "newest": found})
        return self if found.split is None else self.model_copy(update={"newest": found})


def write_prediction(record: PredictionRecord, file: Path) -> None:
    """Write the file; one that is there already is replaced once the new one is whole."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def read_prediction(file: Path) -> PredictionRecord | None:
    """Read the file; None if there is none.

    Raises:
        ConfigError: it cannot be read, or is none that this version writes.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise _refusal(file, f"has more than {MAX_BYTES:,} bytes")
        return PredictionRecord.model_validate_json(file.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _refusal(file, f"is no prediction of this version: {where}: {first['msg']}") from error


def _refusal(file: Path, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=file.name, remedy=remedy)])
