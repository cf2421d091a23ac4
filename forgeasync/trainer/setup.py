"""Setup of a trainer, equal on every rank. Imports nothing of TorchTitan."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.algorithms import Loss
from forgeasync.config import LoraSection, ModelFacts, TrainerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Options of a trainer; the controller sends them to every rank."""

    section: TrainerSection
    facts: ModelFacts
    temperature: float
    """Sampling temperature of the generators."""
    loss: Loss
    seed: int
    checkpoint: Path | None
    """Hugging Face folder with the initial weights; None: random weights."""
    is_bitwise: bool = False
    """Whether layers return what the generator computes, bit for bit, and every difference is an error."""
    lora: LoraSection | None = None
    """If set, the model is frozen, and adapters are trained, published and saved instead."""
    average_alpha: float | None = None
    """Decay of the moving average of the trained weights per step; None: no average."""
    max_token_age: int | None = None
    """Maximum age of trained tokens in versions; older ones are left out of the loss and its denominator."""
    resume_from: Path | None = None
    """Checkpoint of a run to continue from."""
    gpu_share: float | None = None
    """Limit of the CUDA allocator, as a share of the GPU's memory. The rest is for an engine there; None: no
    limit."""
    empties_cache: bool = False
    """Whether to return cached GPU memory after every step, for an engine that wakes up then."""
    bad_steps: Path | None = None
    """Folder for the rows of batches with a bad step; None: they are not saved."""
