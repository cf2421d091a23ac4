"""The trainer mesh: layout, optimizer, and what it replays."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema.section import Count, CountOrZero, Procs, Section

ROW_ALIGNMENT = 64
"""Packed rows are padded to a multiple of this; tensor-parallel ranks get equal parts of it."""


class ParallelSection(Section):
    """The trainer's mesh. The data-parallel shard degree is what num_procs leaves over."""

    num_procs: Procs = 1
    """Trainer procs, one per GPU (or CPU process)."""
    data_replicate: Procs = 1
    """HSDP replicas of the sharded model."""
    tensor: Procs = 1
    sequence: bool = True
    """With tensor parallelism, split what lies between its matrix products along the sequence too."""
    context: Procs = 1
    expert: Procs = 1
    """Expert parallel degree; borrows ranks of the other dimensions."""

    @property
    def data_shard(self) -> int:
        """FSDP shard degree: the procs that replicas, tensor and context parallelism leave over."""
        return self.num_procs // (self.data_replicate * self.tensor * self.context)


class ActivationCheckpointing(StrEnum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSection(Section):
    """AdamW with a linear warm-up to the learning rate and, if asked for, a linear decay to zero."""

    learning_rate: float = Field(ge=1e-12, le=1.0)
    """About how far one step moves every parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """How much of the moments is kept at every step: 1 would never take a gradient in."""
    eps: float = Field(default=1e-8, ge=1e-20, le=1.0)
    """Added to the root of the second moment, which is 0 in float32 for gradients below 1e-22."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1e12)
    """A step takes off learning_rate * weight_decay of every parameter."""
    warmup_steps: CountOrZero = 0
    decay_steps: tuple[CountOrZero, CountOrZero] | None = None
    """The learning rate falls linearly to zero from the first of these steps to the second; null keeps it."""
    max_grad_norm: float = Field(default=1.0, ge=1e-6, le=1e30)
    """Larger gradients are scaled down to this norm; much smaller ones than the default vanish in eps."""


class RoutingReplay(StrEnum):
    """Which tokens' experts the trainer takes from the generator's record (Keep Routing)."""

    OFF = "off"
    RESPONSE = "response"
    """Response tokens; prompts are routed by the trainer's own gate."""
    ALL = "all"


class RouterBias(StrEnum):
    """What happens in training to the biases that correct a router's choice (DeepSeek-V3)."""

    FROZEN = "frozen"
    UPDATED = "updated"
    """Moved after every step so that experts get equally many tokens, and published with the weights."""


class TrainerSection(Section):
    """The trainer mesh: TorchTitan's model under FSDP2, TP and EP."""

    parallel: ParallelSection = ParallelSection()
    dtype: Dtype = Dtype.FLOAT32
    """Compute dtype; master weights and optimizer state are float32."""
    tokens_per_row: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Length of a packed row; every microbatch is one row per data-parallel rank."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    compile: bool = False
    """torch.compile of every layer."""
    cpu_offload: bool = False
    """Keep the shards of parameters, gradients and optimizer state in host memory, and step there: more room
    on a GPU at the price of copies in every microbatch. Without a GPU they are there anyway."""
    routing_replay: RoutingReplay = RoutingReplay.ALL
    router_bias: RouterBias = RouterBias.FROZEN
    router_bias_speed: float = Field(default=1e-3, ge=1e-12, le=1.0)
    """How far a step moves a bias that is updated; the scores that it is added to are from 0 to 1."""
    keep_sampling_mask: bool = True
    """The softmax runs over the tokens that the generator kept (top-k, top-p, min-p), and only over them."""
    replay_probe_share: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the rows on which the mismatch without routing replay is measured too, at the price of one
    more forward pass over them."""
    steps_per_batch: Count = 1
    """Optimizer steps that a batch makes, each on as many whole groups; must divide
    algorithm.groups_per_step. One batch is one policy version, however many steps it makes."""
    max_skipped_steps: Count = 3
    """An optimizer step whose loss or gradient is not finite is skipped and counted; after this many batches
    in a row with a skipped step the run ends with an error."""
    max_fresh_mismatch: float = Field(default=0.5, gt=0.0, le=1e6)
    """The run ends with an error before a step whose tokens, sampled under the very weights that train, have
    log-probabilities that differ from the generator's by more than this on average, in nats."""
    optimizer: OptimizerSection

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return RoutingReplay.OFF if value is False else value
