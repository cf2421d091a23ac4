"""Everything that a trainer is started with, equal on every rank."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.algorithms import Loss
from forgeasync.config import LoraSection, ModelFacts, TrainerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Travels from the controller to every rank as it is: a new option of the trainer is one field here."""

    section: TrainerSection
    facts: ModelFacts
    temperature: float
    """The one that the generators sample with."""
    loss: Loss
    seed: int
    checkpoint: Path | None
    """Hugging Face folder with the first weights; None: they are random."""
    lora: LoraSection | None = None
    """With it the model is frozen, and adapters of it are trained, published and saved instead."""
    average_alpha: float | None = None
    """Share that an average of what is trained keeps of itself at a step; None: there is none."""
    max_token_age: int | None = None
    """Tokens older than so many versions are left out of the loss and of what it is divided by."""
    resume_from: Path | None = None
    """Checkpoint of a run to go on from."""
    bad_steps: Path | None = None
    """Folder for the rows of batches with a bad step; None: they are not kept."""
