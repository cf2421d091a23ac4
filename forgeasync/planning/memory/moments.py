"""Moments of an optimizer step that can be its fullest, and what comes and goes in each.

FSDP2 gathers a layer's weights before it runs, and the next one's meanwhile; in the backward pass a layer's
gradients exist whole until they are reduced, in float32, to the rank's shard. The output layer (with tied
weights the embedding too) stays gathered from its forward to its backward pass, while which nothing else is.
Counted on torch 2.13.
"""

from dataclasses import dataclass

from forgeasync.config import Dtype, ModelFacts, RunConfig
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    GATHER_BLOCK_BYTES,
    GATHER_COST,
    LOGITS_CHUNK_TOKENS,
    kept_bytes_per_token,
)
from forgeasync.planning.memory.activations import layer_activations, outside_activations
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine
from forgeasync.planning.memory.parameters import ParameterCounts, trainer_parameters_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes of one rank that come and go."""

    name: str
    activations: float = 0.0
    logits: float = 0.0
    gathered_weights: float = 0.0
    gathered_gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        parts = (self.activations, self.logits, self.gathered_weights, self.gathered_gradients)
        return sum(parts) + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Bytes that FSDP2 handles at once, of the layer with the most and of the output layer (``head``)."""

    layer_weights: float
    next_weights: float
    head_weights: float
    """Gathered, those of the next layer ahead of time; what a rank has whole it copies, but not ahead."""
    layer_gradients: float
    head_gradients: float
    """Whole ones, in the compute dtype; 0 where adapters are trained."""
    layer_reduced: float
    head_reduced: float
    """Float32 buffers that gradients are reduced in; a rank that shares them with none has one too."""


def step_moments(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> tuple[Moment, ...]:
    """List all candidates, without gradients of earlier rows, weights and optimizer state."""
    dense, moe = (
        layer_activations(config, facts, has_experts=has_experts, machine=machine)
        for has_experts in (False, True)
    )
    choice = config.trainer.activation_checkpointing
    last = moe if facts.num_moe_layers else dense
    kept = facts.num_dense_layers * dense.kept(choice) + facts.num_moe_layers * moe.kept(choice)
    units = _units(config, facts, counts)
    is_tied = facts.tie_word_embeddings
    # Tied, the output layer waits for the embedding's backward pass.
    head_weights = units.head_weights if is_tied else 0.0
    head_gradients = units.head_gradients if is_tied else 0.0
    row = kept - last.kept(choice)
    layer = last.whole + last.passing
    return (
        *_output_layer(config, facts, units, kept + outside_activations(config, facts, machine=machine)),
        Moment(
            name="backward pass of the last layer",
            activations=row + layer,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=units.head_gradients if is_tied else units.head_reduced,
        ),
        Moment(
            name="backward pass of a layer, while the gradients of the one after it are reduced",
            activations=row - last.kept(choice) + layer,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=head_gradients + units.layer_reduced,
        ),
        Moment(
            name="reduction of a layer's gradients",
            activations=row,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=head_gradients + units.layer_gradients + units.layer_reduced,
        ),
        Moment(
            name="backward pass of the embedding",
            gathered_weights=units.head_weights,
            # Tied, the output layer's gradient is there still, to be added to.
            gathered_gradients=units.head_gradients * (2 if is_tied else 1)
            + units.head_reduced
            + units.layer_reduced,
        ),
        _optimizer_step(config, counts, machine),
    )


def _output_layer(
    config: RunConfig, facts: ModelFacts, units: _Units, activations: float
) -> tuple[Moment, Moment]:
    """Backward pass of a chunk: while its logits' gradients are made, and when the weight's are.

    Where only the logits in kept sets are computed there is less of the former: those of the uncut tokens,
    and lists of at most one id for every ``GATHER_COST`` logits.
    """
    trainer = config.trainer
    tokens = trainer.tokens_per_row // trainer.parallel.context
    chunk = min(tokens, LOGITS_CHUNK_TOKENS)
    num_logits = chunk * facts.vocab_size / trainer.parallel.tensor
    logits = num_logits * FLOAT32_BYTES
    mask, block = 0.0, 0.0
    if kept_bytes_per_token(config, facts):
        mask = num_logits
        rows = num_logits / GATHER_COST * 2 * facts.hidden_size * FLOAT32_BYTES
        block = min(rows, GATHER_BLOCK_BYTES)
    # Gradients of several products are added up in float32. A product in float32 is added in place.
    is_summed = tokens > LOGITS_CHUNK_TOKENS or bool(config.algorithm.terms)
    earlier = units.head_reduced if is_summed else 0.0
    is_in_place = is_summed and trainer.dtype is Dtype.FLOAT32
    return (
        Moment(
            name="backward pass of the output layer",
            activations=activations,
            # Scaled logits, the gradient through the chosen one, two that make up the log-sum-exp's, and
            # which of them are cut away.
            logits=4 * logits + mask,
            gathered_weights=units.head_weights,
            gathered_gradients=earlier,
        ),
        Moment(
            name="gradient of the output layer",
            activations=activations,
            logits=2 * logits + block,
            gathered_weights=units.head_weights,
            gathered_gradients=earlier + (0.0 if is_in_place else units.head_gradients),
        ),
    )


def _optimizer_step(config: RunConfig, counts: ParameterCounts, machine: Machine) -> Moment:
    """AdamW's square roots: on GPUs of all parameters at once, on CPUs of one after the other."""
    trains_all = config.lora is None and machine is Machine.GPU
    owned = trainer_parameters_per_rank(config, counts) if trains_all else 0
    return Moment(name="optimizer step", optimizer=owned * FLOAT32_BYTES)


def _units(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> _Units:
    parallel = config.trainer.parallel
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    shards = parallel.data_shard * parallel.context
    # Expert parallelism borrows ranks: those that are left shard each expert.
    expert_shards = shards * parallel.tensor // parallel.expert if parallel.expert > 1 else shards
    rest = (counts.in_layers / parallel.tensor + counts.replicated) / facts.num_layers
    experts = counts.experts / max(1, facts.num_moe_layers)
    experts /= parallel.expert if parallel.expert > 1 else parallel.tensor
    head = counts.vocabulary / parallel.tensor
    trained = 1.0 if config.lora is None else 0.0
    return _Units(
        layer_weights=(rest + experts) * element,
        next_weights=(rest * (shards > 1) + experts * (expert_shards > 1)) * element,
        head_weights=head * element,
        layer_gradients=(rest + experts) * element * trained,
        head_gradients=head * element * trained,
        layer_reduced=(rest + experts) * FLOAT32_BYTES * trained,
        head_reduced=head * FLOAT32_BYTES * trained,
    )
