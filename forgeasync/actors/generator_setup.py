"""What a generator, or a teacher's engine, is started with."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import GeneratorSection, LoraSection, ModelFacts, WeightsSection
from forgeasync.rollouts import CaptureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """Everything that a generator is started with."""

    model_path: Path
    facts: ModelFacts
    section: GeneratorSection
    max_context_length: int
    seed: int
    records: CaptureSpec
    weights: WeightsSection
    lora: LoraSection | None
    payload_capacity_bytes: int
    gpu_bytes: int
    """What each process of the engine takes of its GPU for certain, by the memory plan."""
    num_scored_ids: int = 0
    """Ids that a teacher is asked for at each token."""
