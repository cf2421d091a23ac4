"""What is predicted of a run while it goes on."""

from pydantic import Field

from forgeasync.schema import Count, Procs, Section


class PredictionSection(Section):
    """A run's predicted times, and what changes of it would bring (docs/simulation.md)."""

    profile: str = Field(min_length=1, max_length=4096)
    """File of a profile that ``python -m apps.profile`` has measured of this config."""
    refit_every_steps: Count | None = 20
    """Steps after which lengths are fitted anew to the groups that were trained on since the last time, and
    the run and the splits of its GPUs are simulated with them; null: never."""
    max_replicas: Procs | None = None
    """Most replicas of the generator that the run may add up to by itself, each as soon as one more is
    predicted to save a tenth of a step; null: it adds none."""
