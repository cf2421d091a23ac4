"""Configs of runs small enough for a test."""

from pathlib import Path

import yaml

from forgeasync.config import dump_config
from forgeasync.testing import tiny_config, write_tiny_model


def write_episodes_run(folder: Path) -> Path:
    """Write a model and the config of a run of two steps; the file. It has no environment yet.

    One trainer proc, kept sets and routing replay on, all rollouts written.
    """
    config = yaml.safe_load(dump_config(tiny_config(write_tiny_model(folder / "model", scale=8.0))))
    config["trainer"]["parallel"] = {"num_procs": 1}
    config["sampling"] = {"max_response_tokens": 12, "top_k": 12, "top_p": 0.9, "temperature": 0.8}
    config["logging"] = {"rollouts_per_step": 100}
    config["evaluation"] = {"num_problems": 4}
    config["max_steps"] = 2
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
