"""What a step's rows add up to."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from forgeasync.trainer.packing import PackedRow, TrainingSequence, pack_row
from forgeasync.trainer.step_sums import StepSums
from tests.support.processes import alone_in_this_process


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with alone_in_this_process(tmp_path_factory.mktemp("group")):
        yield


def make_sequence(ages: list[int]) -> TrainingSequence:
    return TrainingSequence(
        prompt_ids_P=np.asarray([1, 2], np.int32),
        response_ids_T=np.arange(len(ages), dtype=np.int32),
        behavior_logprobs_T=np.zeros(len(ages), np.float32),
        ages_T=np.asarray(ages, np.int32),
        advantage=1.0,
    )


def make_row(ages: list[list[int]]) -> PackedRow:
    return pack_row([make_sequence(ages_of_one) for ages_of_one in ages])


def _metrics(ages: list[list[int]], differences: list[float]) -> dict[str, float]:
    sums = StepSums(num_layers=1, device="cpu")
    sums.add_mismatch(
        torch.tensor(differences),
        torch.zeros(len(differences)),
        torch.ones(len(differences), dtype=torch.bool),
        make_row(ages),
    )
    return sums.metrics(len(differences), mesh=None)


def test_only_responses_of_the_newest_weights_alone_are_fresh() -> None:
    ages, differences = [[0, 0], [1, 0, 0], [0]], [0.1, 0.3, 5.0, 5.0, 5.0, 0.2]
    metrics = _metrics(ages, differences)
    assert metrics["mismatch/fresh_logprob_abs_mean"] == pytest.approx(0.2)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(15.6 / 6)
    assert metrics["mismatch/logprob_abs_max"] == 5.0


def test_without_fresh_responses_there_is_no_such_mean() -> None:
    metrics = _metrics([[1, 0], [2]], [0.1, 0.2, 0.3])
    assert "mismatch/fresh_logprob_abs_mean" not in metrics
