"""What ``fa.train`` makes of objects that are handed to it, without running anything."""

from pathlib import Path
from typing import Any

import pytest
import torch

import forgeasync as fa
from forgeasync.algorithms import PythonObjective
from forgeasync.schema import ConfigError
from forgeasync.training import _write_config
from tests.support.config_samples import CONFIGS


class Wider(fa.Objective):
    """A loss of one's own with an option."""

    width: float = 1.0

    def __call__(self, row: fa.RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -self.width * row.advantages_T * row.logprobs_T, {}


class Louder(fa.PpoClip):
    """A built-in loss, changed."""

    def __call__(self, row: fa.RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses_T, sums = super().__call__(row)
        return 2 * losses_T, sums


class Centered(fa.Grpo):
    """A built-in advantage, changed."""


def written(folder: Path, overrides: dict[str, object] | None = None, **given: Any) -> fa.RunConfig:
    return _write_config(
        folder,
        CONFIGS / "tiny_moe_cpu.yaml",
        overrides or {},
        {f"algorithm.{key}": value for key, value in given.items()},
    )


@pytest.mark.parametrize(
    ("objective", "options"),
    [(Wider(width=2.0), {"width": 2.0}), (Wider(), {}), (Wider, {})],
    ids=["instance", "defaults", "class"],
)
def test_an_own_objective_is_what_trains(
    tmp_path: Path, objective: object, options: dict[str, float]
) -> None:
    found = written(tmp_path, objective=objective).algorithm.objective
    assert isinstance(found, PythonObjective)
    assert found.factory == f"{__name__}.Wider" and found.options == options


def test_a_subclass_of_a_built_in_class_is_not_taken_for_it(tmp_path: Path) -> None:
    algorithm = written(
        tmp_path, objective=Louder(clip_low=0.3, clip_high=0.4), advantage=Centered()
    ).algorithm
    assert algorithm.objective.kind == algorithm.advantage.kind == "python"
    assert algorithm.objective.factory == f"{__name__}.Louder"
    assert algorithm.objective.options["clip_low"] == 0.3


def test_a_built_in_section_stays_one(tmp_path: Path) -> None:
    assert written(tmp_path, objective=fa.Cispo(clip_high=2.0)).algorithm.objective == fa.Cispo(clip_high=2.0)


def test_sections_may_be_anywhere_within_an_override(tmp_path: Path) -> None:
    algorithm = written(
        tmp_path,
        {
            "algorithm.corrections": [fa.TruncatedIs(cap=2.0)],
            "algorithm.kl": {"estimator": fa.K2(), "coefficient": 0.1},
            "algorithm.objective": Wider,
            "run_dir": tmp_path / "run",
        },
    ).algorithm
    assert algorithm.corrections == (fa.TruncatedIs(cap=2.0),)
    assert algorithm.kl is not None and algorithm.kl.estimator == fa.K2()
    assert algorithm.objective.kind == "python"


def test_what_no_config_can_hold_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.corrections\.1 = .*plain data, a section"):
        written(tmp_path, {"algorithm.corrections": [fa.TruncatedIs(cap=2.0), {1, 2}]})


def test_a_loss_takes_instances_of_own_classes() -> None:
    loss = fa.Loss(objective=Wider(width=3.0), corrections=(fa.TruncatedIs(cap=2.0),))
    assert loss.objective.kind == "python" and loss.objective.options == {"width": 3.0}
    assert fa.Loss(objective=Louder(clip_low=0.1, clip_high=0.2)).objective.kind == "python"
