"""From a batch of scored groups to the sequences a trainer packs."""

from collections.abc import Sequence

import numpy as np
import torch

from forgeasync.algorithms import advantages
from forgeasync.config.schema import AdvantageName
from forgeasync.data.rollout import Group, Rollout
from forgeasync.trainer.packing import TrainingSequence


def group_advantages(groups: Sequence[Group], name: AdvantageName) -> list[torch.Tensor]:
    """The advantages of each group's rollouts, float32 [G] each."""
    rewards = [torch.tensor(group.rewards, dtype=torch.float32) for group in groups]
    match name:
        case AdvantageName.GRPO:
            return [advantages.grpo(rewards_G) for rewards_G in rewards]
        case AdvantageName.DR_GRPO:
            return [advantages.dr_grpo(rewards_G) for rewards_G in rewards]
        case AdvantageName.RLOO:
            return [advantages.rloo(rewards_G) for rewards_G in rewards]
        case AdvantageName.REINFORCE_PP:
            whole_N = advantages.reinforce_pp(torch.cat(rewards))
            return list(whole_N.split([len(rewards_G) for rewards_G in rewards]))


def training_sequences(
    groups: Sequence[Group], name: AdvantageName, *, trained_version: int
) -> list[TrainingSequence]:
    """One sequence per rollout; ``trained_version`` is the version of the weights about to be trained."""
    return [
        TrainingSequence(
            prompt_ids_P=rollout.prompt_ids_P,
            response_ids_T=rollout.response_ids_T,
            behavior_logprobs_T=rollout.logprobs_T,
            ages_T=_ages(rollout, trained_version),
            advantage=float(advantage),
        )
        for group, advantages_G in zip(groups, group_advantages(groups, name), strict=True)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True)
    ]


def _ages(rollout: Rollout, trained_version: int) -> np.ndarray:
    ages_T = np.full(rollout.num_response_tokens, -1, np.int32)
    for span in rollout.version_spans:
        ages_T[span.start : span.end] = trained_version - span.version
    assert (ages_T >= 0).all(), "every token has a version no newer than the weights it trains"
    return ages_T
