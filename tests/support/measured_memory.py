"""What ranks of a trainer really allocate in an optimizer step. Runs in processes of their own."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from forgeasync.config import ModelFacts, RunConfig
from forgeasync.trainer import PackedRow, PolicyTrainer, Predictions, TrainerSetup, TrainingSequence, pack_row
from tests.support.live_tensors import LiveTensors
from tests.support.trainers import local, plain_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to measure."""

    name: str
    config: RunConfig
    facts: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    """Between forward and backward pass of a row, besides parameters and optimizer state."""
    peak: int
    """The same over a whole step, gradients included."""


def full_row(config: RunConfig, facts: ModelFacts) -> PackedRow:
    """Sequences as long as can be, side by side, with even loads of the experts."""
    rng = np.random.default_rng(0)
    length = config.model.max_context_length
    num_responses = config.sampling.max_response_tokens
    ids_SK = np.arange(length * facts.top_k, dtype=np.int16).reshape(length, -1) % max(1, facts.num_experts)
    ids_SMK = np.sort(ids_SK, axis=-1)[:, None].repeat(facts.num_moe_layers, 1)

    def sequence() -> TrainingSequence:
        ids = rng.integers(0, facts.vocab_size, length).astype(np.int32)
        prompt, response = ids[:-num_responses], ids[-num_responses:]
        return plain_sequence(prompt, response, expert_ids_SMK=ids_SMK if facts.num_experts else None)

    return pack_row([sequence() for _ in range(config.trainer.tokens_per_row // length)])


def measure(case: Case) -> Measured:
    """One rank's measurements of a case."""
    config = case.config
    setup = TrainerSetup(
        section=config.trainer,
        facts=case.facts,
        temperature=config.sampling.temperature,
        loss=config.algorithm,
        seed=0,
        checkpoint=None,
        lora=config.lora,
    )
    trainer = PolicyTrainer(setup)
    row = full_row(config, case.facts)
    trainer.train_step([row])
    parameters = list(trainer.model.parameters())
    states = trainer._optimizer.state.values()
    optimizer = [state for of_one in states for state in of_one.values() if state.dim()]
    gradients = [0]

    def add_up(*_: object) -> None:
        gradients[0] = _num_bytes(p.grad for p in parameters if p.grad is not None)

    trainer._optimizer.register_step_pre_hook(add_up)
    known = [*parameters, *trainer.model.buffers(), *optimizer]
    kept: list[int] = []
    with LiveTensors(known) as step:

        def watch(module: torch.nn.Module, inputs: object, predictions: Predictions) -> None:
            # The output layer comes last: its gradient is the beginning of the backward pass.
            predictions.logprobs_T.register_hook(lambda gradient: kept.append(step.num_bytes))

        trainer.model.lm_head.register_forward_hook(watch)
        trainer.train_step([row, row])
    return Measured(
        parameters=_num_bytes(parameters),
        gradients=gradients[0],
        optimizer=_num_bytes(optimizer),
        # Of the first row: there are no gradients yet.
        kept=kept[0],
        peak=step.peak_bytes,
    )


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
