"""Optimizer steps under many parallel layouts; processes start once for all cases with as many of them."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from forgeasync.config import (
    ActivationCheckpointing,
    Dtype,
    LoraSection,
    ParallelSection,
    RouterBias,
)
from forgeasync.rollouts import NO_RECORD, TokenReport
from forgeasync.trainer import (
    PackedRow,
    PolicyTrainer,
    TrainingSequence,
    inner_attention,
    pack_row,
    pack_rows,
    replay_routers,
)
from forgeasync.trainer import model as trainer_model
from tests.support import lora
from tests.support.trainers import (
    LARGE_STEP,
    TOKENS_PER_ROW,
    local,
    make_trainer,
    named_tensors,
    step_with_gradients,
)

LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a step is taken of (a model and sequences, by name), and how."""

    model: str
    sequences: str
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    dtype: Dtype = Dtype.FLOAT32
    compile: bool = False
    cpu_offload: bool = False
    tokens_per_row: int = TOKENS_PER_ROW
    learning_rate: float = LEARNING_RATE
    gpu_attention: bool = False
    """The attention that layers have on GPUs, over CPU kernels."""
    export: Path | None = None
    """Where the weights are saved after the step."""

    lora: LoraSection | None = None
    router_bias: RouterBias = RouterBias.FROZEN

    def trainer(self, folder: Path) -> PolicyTrainer:
        options = {
            "temperature": 0.9,
            "tokens_per_row": self.tokens_per_row,
            # test_shared_prefixes.py has rows of trees under layouts.
            "share_prefixes": False,
            "activation_checkpointing": self.checkpointing,
            "compile": self.compile,
            "cpu_offload": self.cpu_offload,
            "dtype": self.dtype,
            "router_bias": self.router_bias,
            "router_bias_speed": 0.01,
            "optimizer": LARGE_STEP.model_copy(update={"learning_rate": self.learning_rate}),
        }
        if self.lora is None:
            return make_trainer(folder, self.parallel, **options)
        return lora.make_trainer(folder, self.parallel, lora=self.lora, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What cases are about: model folders and sequences, by name."""

    folders: Mapping[str, Path]
    sequences: Mapping[str, list[TrainingSequence]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rank's step: whole gradients (as the optimizer saw them) and weights, or those of adapters."""

    metrics: dict[str, float]
    num_rows: int
    """With a target on this rank."""
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    published: list[tuple[int, ...]]
    """Shapes of this rank's shards."""
    replays_exactly: bool | None
    """Whether replaying its own choices changed no bit of a gradient; None if it was not tried."""
    tokens: TokenReport
    """What this rank reports of single tokens."""
    frozen_dtypes: set[torch.dtype]
    keeps_base: bool
    """Whether no bit of what is frozen beneath adapters has changed."""


def take_steps(inputs: Inputs, cases: Mapping[str, Case]) -> dict[str, Outcome]:
    """Every case's step on this rank, each from the folder's weights."""
    outcomes = {}
    for name, case in cases.items():
        with attention_of("cuda") if case.gpu_attention else nullcontext():
            outcomes[name] = _take_step(inputs, case)
    return outcomes


@contextmanager
def attention_of(device_type: str) -> Iterator[None]:
    """Models are built with the attention of another device; what it calls has kernels for CPUs."""
    importlib.import_module("tests.support.varlen_kernel")

    def of_device(_: str, **options: Any) -> object:
        return inner_attention(device_type, **options)

    with mock.patch.object(trainer_model, "inner_attention", of_device):
        yield


def _take_step(inputs: Inputs, case: Case) -> Outcome:
    # Graphs of another layout may be taken for this one's: a process of a run has only one layout.
    torch._dynamo.reset()
    folder = inputs.folders[case.model]
    trainer = case.trainer(folder)
    rows = uneven_rows(inputs.sequences[case.sequences], trainer, case.tokens_per_row)
    base = lora.base_weights(trainer)
    can_replay = case.model == "moe" and case.lora is None
    replays_exactly = _replays_exactly(trainer, rows[0]) if can_replay else None
    result, gradients = step_with_gradients(trainer, rows)
    if case.export is not None:
        trainer.save_hf(case.export, source=folder)
    return Outcome(
        metrics=result.metrics,
        num_rows=sum(row.num_targets > 0 for row in rows),
        gradients=gradients,
        weights=named_tensors(trainer),
        published=[tuple(local(weight.tensor).shape) for weight in trainer.named_weights()],
        replays_exactly=replays_exactly,
        tokens=result.tokens,
        frozen_dtypes={tensor.dtype for tensor in base.values()},
        keeps_base=all(torch.equal(base[name], one) for name, one in lora.base_weights(trainer).items()),
    )


def uneven_rows(
    sequences: Sequence[TrainingSequence], trainer: PolicyTrainer, tokens_per_row: int
) -> list[PackedRow]:
    """This rank's rows: packed ones, and one that only the first data rank has anything in."""
    *most, last = sequences
    rows = pack_rows(most, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)
    return [*rows[trainer.data_rank], pack_row([last] if trainer.data_rank == 0 else [])]


def own_choices(trainer: PolicyTrainer, row: PackedRow) -> np.ndarray:
    """What the routers choose by themselves, as a record: int16 [L, M, K], ascending."""
    chosen: list[torch.Tensor] = []

    def keep(router: torch.nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        ids = outputs[1]
        chosen.append(ids.full_tensor() if isinstance(ids, DTensor) else ids)

    hooks = [router.register_forward_hook(keep) for router in replay_routers(trainer.model)]
    with torch.no_grad():
        trainer.logprobs(row, replay_routing=False)
    for hook in hooks:
        hook.remove()
    mine_LMK = np.sort(torch.stack([ids[0] for ids in chosen], 1).numpy(), axis=-1)
    # With context parallelism this rank has seen its part of the row only, and will replay no other.
    ids_LMK = np.full((len(row.token_ids_L), *mine_LMK.shape[1:]), NO_RECORD, np.int16)
    ids_LMK[trainer._forward.own_part(row)] = mine_LMK
    return ids_LMK


def _replays_exactly(trainer: PolicyTrainer, row: PackedRow) -> bool:
    """Whether gradients through the routers' own choices are the same when those are replayed, bit by bit."""
    unrecorded = replace(row, expert_ids_LMK=None)
    own = _summed_gradients(trainer, unrecorded)
    record = own_choices(trainer, row)
    replayed = _summed_gradients(trainer, replace(row, expert_ids_LMK=record))
    counts = torch.stack([router.replay_counts for router in replay_routers(trainer.model)])
    assert sum(bool(gradient.any()) for gradient in own) > 10 and bool((counts[:, 0] > 0).all())
    is_equal = all(torch.equal(a, b) for a, b in zip(own, replayed, strict=True))
    return is_equal and not counts[:, 1].any()


def _summed_gradients(trainer: PolicyTrainer, row: PackedRow) -> list[torch.Tensor]:
    """This rank's part of the gradients of a row's weighted log-probabilities."""
    # The backward pass recomputes checkpointed layers: it has to find the same experts there.
    with trainer._forward.replay(row):
        logprobs_T = trainer._forward.logprobs(row)
        (logprobs_T * torch.linspace(-1.0, 1.0, len(logprobs_T))).sum().backward()
    gradients = [local(parameter.grad).clone() for parameter in trainer.model.parameters()]
    trainer._optimizer.zero_grad()
    return gradients
