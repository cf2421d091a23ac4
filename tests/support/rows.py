"""A packed row of a few tokens."""

import numpy as np

from forgeasync.trainer import PackedRow, TrainingSequence, pack_row


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
