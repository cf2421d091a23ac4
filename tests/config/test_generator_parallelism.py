"""How engines are spread over GPUs: what is refused, and that a host has enough of them."""

import dataclasses

import pytest

from forgeasync.config import (
    LocalLauncher,
    ModelFacts,
    RunConfig,
    check_gpus,
    check_launcher,
    load_config,
    num_gpus_needed,
)
from forgeasync.models import check_config
from tests.support.config_samples import CONFIGS, FACTS, only

MOE = dataclasses.replace(FACTS, max_position_embeddings=1024)
DENSE = dataclasses.replace(
    MOE,
    model_type="qwen3",
    num_experts=0,
    top_k=0,
    expert_hidden_size=0,
    num_dense_layers=2,
    dense_hidden_size=128,
)


def _config(**generator: object) -> RunConfig:
    changes = [f"generator.{name}={value}" for name, value in generator.items()]
    changes += ["trainer.parallel={num_procs: 2, expert: 1}", "trainer.dtype=bfloat16"]
    return load_config(CONFIGS / "tiny_moe_cpu.yaml", changes)


def test_experts_are_dealt_out_whole() -> None:
    config = _config(tensor_parallel=2, expert_parallel=True)
    assert check_config(config, MOE) == [] == list(check_gpus(config, 8))
    message = only(list(check_gpus(config, 0)))
    assert "generator.expert_parallel" in message and "without GPUs" in message
    # Slices of 33 would not be equal; whole experts are not sliced.
    odd = dataclasses.replace(MOE, expert_hidden_size=33)
    assert check_config(config, odd) == []
    assert "moe_intermediate_size = 33" in only(check_config(_config(tensor_parallel=2), odd))
    seven = check_config(config, dataclasses.replace(MOE, num_experts=7))
    (message,) = (str(problem) for problem in seven if problem.field == "generator.tensor_parallel")
    assert "num_experts = 7" in message


@pytest.mark.parametrize(
    ("facts", "tensor_parallel", "reason"),
    [(DENSE, 2, "model_type 'qwen3' has no experts"), (MOE, 1, "generator.tensor_parallel = 1")],
)
def test_expert_parallelism_needs_experts_and_ranks(
    facts: ModelFacts, tensor_parallel: int, reason: str
) -> None:
    config = _config(tensor_parallel=tensor_parallel, expert_parallel=True)
    message = only(check_config(config, facts))
    assert "generator.expert_parallel" in message and reason in message


def test_gpus_are_counted_before_the_start() -> None:
    config = _config(num_replicas=3, tensor_parallel=2)
    assert num_gpus_needed(config) == 3 * 2 + 2
    assert list(check_gpus(config, 8)) == [], "just enough"
    assert list(check_gpus(config, 0)) == [], "CPU processes"
    message = only(list(check_gpus(config, 7)))
    assert (
        "generator.num_replicas" in message
        and "8 GPUs (3 x 2 + 2)" in message
        and "at most the 7 of this host" in message
        and "configs/launchers/ssh.yaml, slurm.yaml or kubernetes.yaml" in message
        and "launcher.share_gpu=true" in message
    )


def test_roles_that_share_gpus_need_as_many_as_the_larger_one() -> None:
    config = _config(num_replicas=3, tensor_parallel=2)
    config = config.model_copy(update={"launcher": LocalLauncher(share_gpu=True)})
    assert num_gpus_needed(config) == 3 * 2
    assert list(check_gpus(config, 6)) == []
    message = only(list(check_gpus(config, 5)))
    assert "6 GPUs (the larger of 3 x 2 and 2)" in message and "share_gpu" not in message


LORA = "lora={rank: 12, alpha: 24, targets: [q_proj, down_proj]}"
FLOAT32 = "generator.dtype=float32"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.dtype=float32"], "trainer.dtype = 'float32': must be bfloat16 on GPUs"),
        ([LORA, FLOAT32], "generator.dtype = 'float32': must be bfloat16 on GPUs with a lora section"),
        ([], None),
        (["trainer.parallel.context=2"], None),
        ([LORA], None),
        ([FLOAT32], None),
    ],
)
def test_what_gpus_cannot_compute_is_refused(overrides: list[str], words: str | None) -> None:
    file, overlay = CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"
    here = load_config(file, overrides)
    there = load_config([file, overlay], overrides)
    for problems in (list(check_launcher(there)), list(check_gpus(here, 32))):
        assert problems == [] if words is None else words in only(problems)
    assert list(check_gpus(here, 0)) == [], "CPU processes"
