"""benchmarks/chaos_witness.py: counting trainings in an embedding, and a short run of all of chaos.py."""

import json
import subprocess
import sys
from pathlib import Path

import chaos_witness
import psutil
import pytest
import torch
from chaos_witness import LEARNING_RATE, counts

from forgeasync.config import load_config
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).parents[2]


def adam_steps(weights_VD: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """What torch's own AdamW makes of gradients under the settings of the run."""
    parameter = torch.nn.Parameter(weights_VD.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=LEARNING_RATE, betas=(0.0, 0.0), eps=1e-20, weight_decay=0.0
    )
    for gradient_VD in gradients:
        parameter.grad = gradient_VD
        optimizer.step()
    return parameter.detach()


def test_rows_count_the_steps_that_have_touched_them() -> None:
    torch.manual_seed(0)
    weights_VD = torch.randn(6, 64) * 0.1
    # Rows by the steps that touch them: none, one, one, two, three, and one for a quarter of its numbers.
    touched = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 0]])
    gradients = [torch.randn(6, 64) * 1e-4 * row_V[:, None] for row_V in touched]
    gradients[0][5, :16] = 1.0
    assert counts(weights_VD, adam_steps(weights_VD, gradients)) == [0, 1, 1, 2, 3, None]


def test_two_steps_of_opposite_signs_are_not_none() -> None:
    weights_VD = torch.randn(1, 64) * 0.1
    gradient_VD = torch.randn(1, 64)
    flipped_VD = torch.where(torch.arange(64) < 40, -gradient_VD, gradient_VD)
    assert counts(weights_VD, adam_steps(weights_VD, [gradient_VD, flipped_VD])) == [2]


def test_the_config_that_is_written_is_one(tmp_path: Path) -> None:
    config = load_config([chaos_witness.write(tmp_path, num_steps=10)], [])
    assert config.max_steps == 10 and config.data.num_train == chaos_witness.num_prompts(10)
    assert len({chaos_witness.prompt(number) for number in range(140)}) == 140
    with pytest.raises(
        ValueError, match="--witness: 100000 steps take 200120 prompts; must be at most 20000"
    ):
        chaos_witness.write(tmp_path / "other", num_steps=100_000)


@starts(Starts.PROCESSES)
def chaos(out: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "benchmarks/chaos.py", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


ROLES = ("scorer", "generator", "trainer", "storage")
SHORT = (
    *("--witness", "--faults", "4", "--seed", "163", "--steps-per-fault", "8", "--limit-s", "1200"),
    *(part for role in ROLES for part in ("--role", role)),
)
"""A disk that fails within an evaluation, delayed messages, a kill within a checkpoint, dropped messages."""


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_run_on_which_everything_falls_trains_every_group_once(tmp_path: Path) -> None:
    code, said = chaos(tmp_path / "out", *SHORT)
    assert code == 0 and "nothing was lost" in said, said
    assert "prompts were trained on, each once" in said, said
    witnessed = [json.loads(line) for line in (tmp_path / "out" / "witness.jsonl").read_text().splitlines()]
    assert {one["number"] for one in witnessed} == {0, 1, 2, 3}
    assert not any(one["pid"] and psutil.pid_exists(one["pid"]) for one in witnessed)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_without_injection_the_comparison_fails(tmp_path: Path) -> None:
    code, said = chaos(tmp_path / "out", "--off", *SHORT)
    assert code == 1 and "faults were to be injected, 0 were injected" in said, said
