"""What the contenders of ``trainer_throughput.py`` train on: the same sequences, of given lengths."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from buffer_simulation import LengthModel
from common import REPOSITORY
from transformers import AutoModelForCausalLM, PreTrainedModel

from forgeasync.trainer import TrainingSequence

RECORDED = REPOSITORY / "benchmarks" / "data" / "tiny_moe_lengths.json"
LONG_TAIL = LengthModel(median=32.0, sigma=1.2, shortest=8, longest=512)
PROMPT_TOKENS = 16
"""Tokens of each prompt; responses have lognormal lengths."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 1e-12
"""So small that every step of a benchmark is taken from the same weights."""
BETAS, EPS, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0

Lengths = list[tuple[int, int]]
"""Prompt and response tokens of every sequence."""


def recorded_lengths(num: int) -> Lengths:
    """Drawn from rollouts of the embedded default."""
    pairs = json.loads(RECORDED.read_text(encoding="utf-8"))["lengths"]
    rng = np.random.default_rng(0)
    return [tuple(pairs[index]) for index in rng.integers(0, len(pairs), num)]


def lognormal_lengths(num: int) -> Lengths:
    """Responses of which the longest is 64 times the shortest."""
    rng = np.random.default_rng(0)
    return [(PROMPT_TOKENS, *LONG_TAIL.sample(LONG_TAIL.of_prompt(rng), 1, rng)) for _ in range(num)]


DISTRIBUTIONS: Mapping[str, Callable[[int], Lengths]] = {
    "recorded": recorded_lengths,
    "lognormal 1..64x": lognormal_lengths,
}


def with_room(model: Path, folder: Path, lengths: Lengths) -> Path:
    """The model, its weights linked into ``folder``, with positions enough for every sequence."""
    folder.mkdir()
    for file in model.iterdir():
        os.symlink(file.resolve(), folder / file.name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    longest = max(prompt + response for prompt, response in lengths)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], longest)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@torch.no_grad()
def make_sequences(model: Path, lengths: Lengths) -> list[TrainingSequence]:
    """Random tokens; behavior log-probabilities are the model's own with some noise."""
    rng = np.random.default_rng(1)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [_sequence(policy, num_prompt, num_response, rng) for num_prompt, num_response in lengths]


def _sequence(
    policy: PreTrainedModel, num_prompt: int, num_response: int, rng: np.random.Generator
) -> TrainingSequence:
    ids = torch.from_numpy(rng.integers(2, policy.config.vocab_size, num_prompt + num_response))
    logprobs_TV = policy(ids[None]).logits[0, num_prompt - 1 : -1].log_softmax(-1)
    logprobs_T = logprobs_TV.gather(1, ids[num_prompt:, None])[:, 0].numpy()
    return TrainingSequence(
        prompt_ids_P=ids[:num_prompt].numpy().astype(np.int32),
        response_ids_T=ids[num_prompt:].numpy().astype(np.int32),
        behavior_logprobs_T=(logprobs_T + 0.1 * rng.standard_normal(num_response)).astype(np.float32),
        ages_T=np.zeros(num_response, np.int32),
        advantage=float(rng.standard_normal()),
    )


def num_tokens(sequences: Sequence[TrainingSequence]) -> int:
    """Prompt and response tokens, without padding."""
    return sum(sequence.num_tokens for sequence in sequences)
