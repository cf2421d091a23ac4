"""Configs of runs small enough for a test."""

from pathlib import Path

from forgeasync.config import dump_config, load_config
from forgeasync.testing import tiny_config, write_tiny_model


def write_tiny_run(folder: Path, *overrides: str, scale: float = 1.0) -> Path:
    """Write a model and the config of a run of three steps; the file. ``scale``: of the model's weights."""
    file = folder / "run.yaml"
    file.write_text(dump_config(tiny_config(write_tiny_model(folder / "model", scale=scale))))
    if overrides:
        file.write_text(dump_config(load_config(file, overrides)))
    return file


def write_episodes_run(folder: Path) -> Path:
    """Write a run of two steps for environments, of which it has none yet.

    One trainer proc, kept sets and routing replay on, all rollouts written.
    """
    return write_tiny_run(
        folder,
        "trainer.parallel={num_procs: 1, expert: 1}",
        "sampling={max_response_tokens: 12, top_k: 12, top_p: 0.9, temperature: 0.8}",
        "logging.rollouts_per_step=100",
        "evaluation.num_problems=4",
        "max_steps=2",
        scale=8.0,
    )
