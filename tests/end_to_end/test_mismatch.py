"""Generator and trainer agree: with replay, as measured by benchmarks/mismatch.py, and bit for bit."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forgeasync.algorithms import RowTokens
from forgeasync.rollouts import Response, Task
from forgeasync.testing import train_three_steps, write_tiny_model
from forgeasync.training import TrainingFailed

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

REPOSITORY = Path(__file__).resolve().parents[2]

Lines = dict[tuple[str, str], dict[str, float]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The benchmark's rows by (setting, replayed)."""
    folder = tmp_path_factory.mktemp("mismatch")
    model = write_tiny_model(folder / "hf", scale=8.0, num_experts=8, top_k=3)
    command = [sys.executable, "benchmarks/mismatch.py", "--model", str(model), "--groups", "12"]
    subprocess.run(
        [*command, "--out", str(folder / "out.json")],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    rows = json.loads((folder / "out.json").read_text())["rows"]
    return {(row["setting"], row["replayed"]): row for row in rows}


def test_with_both_the_ratio_of_fresh_data_is_one(lines: Lines) -> None:
    assert lines["same weights", "both"]["abs_max"] < 1e-3
    assert lines["same weights", "both"]["gradient_cosine"] > 1 - 1e-6
    # Without the kept sets it is not: the comparison above means something.
    assert lines["same weights", "routing"]["abs_max"] > 0.05


def test_other_choices_do_not_matter_once_they_are_replayed(lines: Lines) -> None:
    noisy = lines["noisy choice", "both"]
    assert noisy["disagreement_share"] > 0.03
    assert noisy["abs_mean"] * 10 < lines["noisy choice", "kept sets"]["abs_mean"]
    assert noisy["gradient_cosine"] > lines["noisy choice", "kept sets"]["gradient_cosine"]


def test_replay_helps_where_the_gate_itself_differs(lines: Lines) -> None:
    noisy = lines["noisy gate", "both"]
    assert noisy["disagreement_share"] > 0.01
    assert noisy["kl"] < lines["noisy gate", "kept sets"]["kl"] < lines["noisy gate", "nothing"]["kl"]
    assert noisy["gradient_cosine"] > lines["noisy gate", "nothing"]["gradient_cosine"]


def test_rounded_weights_leave_little_between_them(lines: Lines) -> None:
    rounded = lines["bf16 generator", "both"]
    assert rounded["kl"] < lines["bf16 generator", "nothing"]["kl"]
    assert rounded["gradient_cosine"] > 0.99


def num_digits(task: Task, response: Response) -> float:
    """Reward random text for what it has by chance, so that every step changes the weights."""
    return float(sum(map(str.isdigit, response.text)))


@pytest.mark.parametrize("max_off_policy_steps", [0, 2])
def test_bitwise_runs_learn_without_a_difference(tmp_path: Path, max_off_policy_steps: int) -> None:
    overrides = {
        "fidelity": "bitwise",
        "generator.batch_invariant": True,
        "trainer.parallel.expert": 1,
        "trainer.share_prefixes": True,
        "sampling.top_k": 9,
        "max_steps": 6,
        "max_off_policy_steps": max_off_policy_steps,
    }
    _, *steps = train_three_steps(tmp_path, overrides, reward=num_digits).metrics
    assert len(steps) == 6 and all(step["grad_norm"] > 0.0 for step in steps)
    # An asynchronous step may have no response that was sampled under its weights alone.
    name = "mismatch/fresh_logprob_abs_mean"
    assert {step[name] for step in steps if name in step} == {0.0}
    if max_off_policy_steps == 0:
        assert {step["mismatch/logprob_abs_max"] for step in steps} == {0.0}


def change_experts(row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that changes the trainer's second layer of experts, in the last bit, from the next row on."""
    kernels = sys.modules.get("vllm._custom_ops")
    # The controller, which tries the function, does not have them.
    if kernels is not None and not hasattr(kernels, "is_changed"):
        kernel, layers = kernels.cpu_fused_moe, itertools.cycle((0, 1))

        def changed(out: torch.Tensor, *arguments: object) -> None:
            kernel(out, *arguments)
            if next(layers):
                out.copy_(out.nextafter(torch.tensor(torch.inf)))

        vars(kernels).update(cpu_fused_moe=changed, is_changed=True)
    return -row.log_ratios() * row.advantages_T, {}


def test_a_run_that_ends_with_a_difference_names_the_operator(tmp_path: Path) -> None:
    overrides = {
        "fidelity": "bitwise",
        "generator.batch_invariant": True,
        "generator.num_replicas": 2,
        "trainer.parallel.expert": 1,
    }
    with pytest.raises(TrainingFailed) as failed:
        train_three_steps(tmp_path, overrides, reward=num_digits, objective=change_experts)
    words = str(failed.value)
    assert "MismatchTooLarge" in words and "log-probability of token" in words, words
    assert "; the first operator that differs is model.layers.1.mlp.experts (largest" in words, words
