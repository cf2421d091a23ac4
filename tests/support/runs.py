"""Configs of runs small enough for a test."""

from pathlib import Path

import yaml

from forgeasync.config import (
    AlgorithmSection,
    DataSection,
    EvaluationSection,
    GeneratorSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PayloadSection,
    ReasoningGymSource,
    RunConfig,
    SamplingSection,
    TrainerSection,
    dump_config,
)
from tests.support.models import write_random_model


def tiny_config(folder: Path) -> RunConfig:
    """Two trainer procs, one generator, the model of ``tests.support.models``."""
    return RunConfig(
        name="tiny",
        max_steps=3,
        model=ModelSection(path=str(folder), max_context_length=160),
        data=DataSection(
            source=ReasoningGymSource(
                kind="reasoning_gym",
                task="chain_sum",
                options={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
                answer_prefix="#",
            ),
            num_train=64,
            num_held_out=8,
        ),
        sampling=SamplingSection(max_response_tokens=24),
        generator=GeneratorSection(max_num_seqs=32, max_num_batched_tokens=512, kv_cache_gib=0.05),
        trainer=TrainerSection(
            parallel=ParallelSection(num_procs=2, expert=2),
            tokens_per_row=256,
            optimizer=OptimizerSection(learning_rate=1e-3),
        ),
        algorithm=AlgorithmSection(group_size=4, groups_per_step=4),
        payload=PayloadSection(capacity_gib=0.02),
        evaluation=EvaluationSection(num_problems=8),
    )


def write_episodes_run(folder: Path) -> Path:
    """Write a model and the config of a run of two steps; the file. It has no environment yet.

    One trainer proc, kept sets and routing replay on, all rollouts written.
    """
    config = yaml.safe_load(dump_config(tiny_config(write_random_model(folder / "model", scale=8.0))))
    config["trainer"]["parallel"] = {"num_procs": 1}
    config["sampling"] = {"max_response_tokens": 12, "top_k": 12, "top_p": 0.9, "temperature": 0.8}
    config["logging"] = {"rollouts_per_step": 100}
    config["evaluation"] = {"num_problems": 4}
    config["max_steps"] = 2
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
