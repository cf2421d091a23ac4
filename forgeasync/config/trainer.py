"""Sections for the trainer mesh: parallel layout, optimizer, routing replay and recovery."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema import Count, CountOrZero, Procs, Refusal, Section

ROW_ALIGNMENT = 64
"""Multiple that packed rows are padded to, so that tensor-parallel ranks get equal parts."""


class ParallelSection(Section):
    """Layout of the trainer's mesh; the shard degree is num_procs divided by the other degrees."""

    num_procs: Procs = 1
    """Number of trainer processes: one per GPU, or CPU processes."""
    data_replicate: Procs = 1
    """Number of HSDP replicas of the sharded model."""
    tensor: Procs = 1
    """Degree of tensor parallelism."""
    sequence: bool = True
    """Split activations between tensor-parallel matrix products along the sequence (sequence parallelism)."""
    context: Procs = 1
    """Degree of context parallelism, which splits rows along the sequence."""
    expert: Procs = 1
    """Degree of expert parallelism: experts are split over data_shard, tensor and context ranks."""

    @property
    def data_shard(self) -> int:
        """FSDP shard degree: num_procs divided by the replicate, tensor and context degrees."""
        return self.num_procs // (self.data_replicate * self.tensor * self.context)

    def find_problems(self) -> Iterator[Refusal]:
        """Yield degrees that do not divide what they split."""
        product = self.data_replicate * self.tensor * self.context
        # TorchTitan splits experts over these ranks; the remaining ranks shard each expert.
        expert_ranks = self.data_shard * self.tensor * self.context
        if self.num_procs % product:
            yield (
                "num_procs",
                f"must be a multiple of data_replicate * tensor * context = {product}",
            )
        elif expert_ranks % self.expert:
            remedy = (
                f"must divide data_shard * tensor * context = {expert_ranks}, the ranks that experts are "
            )
            yield "expert", f"{remedy}split over"
        product = self.tensor * self.context
        if ROW_ALIGNMENT % product:
            yield (
                "tensor" if self.tensor > 1 else "context",
                f"tensor * context = {product} must divide {ROW_ALIGNMENT}, the multiple that packed rows "
                "are padded to",
            )


class ActivationCheckpointing(StrEnum):
    """Which activations a backward pass computes again instead of storing them."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSection(Section):
    """AdamW with a linear warm-up to the learning rate and, with ``decay_steps``, a linear decay to zero."""

    learning_rate: float = Field(ge=1e-12, le=1.0)
    """Learning rate after the warm-up: approximately how far one step moves each parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = Field(default=1e-8, ge=1e-20, le=1.0)
    """Term added to the root of the second moment, which is 0 in float32 for gradients below 1e-22."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1e12)
    """Decoupled weight decay: each step subtracts learning_rate * weight_decay of every parameter's value."""
    warmup_steps: CountOrZero = 0
    """Number of first steps over which the learning rate rises linearly."""
    decay_steps: tuple[CountOrZero, CountOrZero] | None = None
    """First and last step of a linear decay of the learning rate to zero; null: no decay."""
    max_grad_norm: float = Field(default=1.0, ge=1e-6, le=1e30)
    """Largest gradient norm; larger gradients are scaled down to it. If norms are far below the default, eps
    outweighs the root of the second moment."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield a weight decay that removes whole parameters, and decay steps in the wrong order."""
        if self.learning_rate * self.weight_decay >= 1.0:
            yield (
                "weight_decay",
                f"times learning_rate = {self.learning_rate:g} must be less than 1: otherwise one step of "
                "weight decay would erase every parameter",
            )
        if self.decay_steps is not None and self.decay_steps[0] >= self.decay_steps[1]:
            yield "decay_steps", "must be two steps, the first less than the second"


class RoutingReplay(StrEnum):
    """Tokens for which the trainer replays the generator's routed experts."""

    OFF = "off"
    RESPONSE = "response"
    """Response tokens only; the trainer's own gate routes prompts."""
    ALL = "all"


class RouterBias(StrEnum):
    """Whether training changes the biases that DeepSeek-V3's router adds to scores to choose experts."""

    FROZEN = "frozen"
    UPDATED = "updated"
    """Biases are moved after every step to balance the experts' load, and are published."""


class FlashAttention(StrEnum):
    """Version of FlashAttention that computes attention over packed rows on GPUs."""

    AUTO = "auto"
    """The newest installed version that supports the GPU: FA3 on Hopper, FA4 on Blackwell, else FA2."""
    FA2 = "FA2"
    FA3 = "FA3"
    FA4 = "FA4"


FLASH_ATTENTION_PACKAGES = {3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
"""Packages that torch 2.13 imports for FlashAttention 3 and 4; version 2 is built into torch."""


class RecoverySection(Section):
    """Recovery from the loss of a trainer rank: the trainer restarts from snapshots in its hosts' shared
    memory, while generators continue."""

    snapshot_every_steps: Count | None = 1
    """Number of batches between snapshots, in which every rank copies its state to shared memory. The payload
    store keeps the rollouts of the batches since the last one. null: no snapshots; a lost rank ends the
    run."""
    max_restarts: Count = 3
    """Maximum number of restarts without a complete step between them; after that the run ends."""
    heartbeat_s: float = Field(default=8.0, ge=0.5, le=3600.0)
    """Time after which a rank that does not answer the controller's requests counts as dead, in seconds."""


class OnBadStep(StrEnum):
    """Policy for an optimizer step that would spoil the weights, and for its batch. Weights, moments and
    routing biases stay unchanged."""

    SKIP = "skip"
    """The step is skipped; other optimizer steps of its batch are made."""
    ROLLBACK = "rollback"
    """All optimizer steps of the batch are undone, with weights, moments and random states."""
    STOP = "stop"
    """The step is not made, and the run ends."""


class BadStepsSection(Section):
    """Policies for optimizer steps whose loss or gradient is not finite, or whose gradient is far too large.
    Such steps are counted, and their batches are stored in the run's folder ``bad_steps``."""

    on_nan: OnBadStep = OnBadStep.SKIP
    """Policy for a nan or inf in a loss, a gradient or a gradient norm on any rank. If weights are not finite
    after a step, it can only be rolled back, which ``skip`` does too."""
    on_spike: OnBadStep | None = None
    """Policy for a gradient norm, before clipping, of more than ``spike_factor`` times the median of the last
    ``spike_window`` optimizer steps that were made. null: spikes are not detected."""
    spike_factor: float = Field(default=10.0, gt=1.0, le=1e6)
    """Multiple of the median gradient norm above which a step is a spike."""
    spike_window: int = Field(default=32, ge=4, le=10_000)
    """Number of optimizer steps in the median. Steps without a gradient do not count; until there are that
    many, nothing is a spike."""
    max_in_a_row: Count = 3
    """Number of consecutive batches with a bad step after which the run ends with an error."""
    num_kept: Count = 20
    """Maximum number of stored batches with a bad step; the newest are kept."""


class TrainerSection(Section):
    """The trainer mesh: TorchTitan's model under FSDP2, TP and EP."""

    parallel: ParallelSection = ParallelSection()
    dtype: Dtype = Dtype.FLOAT32
    """Compute dtype; master weights and optimizer state are float32."""
    tokens_per_row: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Length of a packed row in tokens; every microbatch is one row per data-parallel rank."""
    share_prefixes: bool | None = None
    """Compute the tokens that sequences of a row have in common at their beginning, such as the prompt of a
    group, once. null: true without context parallelism, which divides rows."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """Which activations the backward pass computes again instead of keeping them."""
    compile: bool = False
    """Use torch.compile for every layer."""
    flash_attention: FlashAttention = FlashAttention.AUTO
    """FA3 and FA4 need their own packages on the trainer's hosts; the config is refused if those are missing.
    FA2 is part of torch. No effect without a GPU."""
    cpu_offload: bool = False
    """Keep the shards of parameters, gradients and optimizer state in host memory and step the optimizer
    there. Saves GPU memory but adds copies in every microbatch; no effect without a GPU."""
    routing_replay: RoutingReplay = RoutingReplay.ALL
    router_bias: RouterBias = RouterBias.FROZEN
    router_bias_speed: float = Field(default=1e-3, ge=1e-12, le=1.0)
    """How far a step moves a bias with ``router_bias: updated``; biases are added to scores from 0 to 1."""
    keep_sampling_mask: bool = True
    """Compute the softmax over only the tokens that the generator kept (top-k, top-p, min-p)."""
    replay_probe_share: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the rows on which the mismatch without routing replay is measured too, at the cost of one more
    forward pass over them."""
    steps_per_batch: Count = 1
    """Optimizer steps per batch, each on the same number of whole groups; must divide
    algorithm.groups_per_step. A batch is one policy version, regardless of its number of optimizer steps."""
    recovery: RecoverySection = RecoverySection()
    bad_steps: BadStepsSection = BadStepsSection()
    max_fresh_mismatch: float = Field(default=0.5, gt=0.0, le=1e6)
    """Largest mean difference, in nats, between the trainer's and the generator's log-probabilities of tokens
    of age 0, which were sampled with the weights that are trained. If it is larger, the run ends with an
    error before the step."""
    optimizer: OptimizerSection

    @property
    def shares_prefixes(self) -> bool:
        """Value of ``share_prefixes``, with null replaced by its default."""
        return self.parallel.context == 1 if self.share_prefixes is None else self.share_prefixes

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """Accept false for ``off``, since YAML reads a bare ``off`` as false."""
        return RoutingReplay.OFF if value is False else value

    def find_problems(self) -> Iterator[Refusal]:
        """Yield prefixes that cannot be shared, and bad-step policies without the snapshots they need."""
        if self.share_prefixes and self.parallel.context > 1:
            yield "share_prefixes", "must be null or false with parallel.context above 1, which divides rows"
        every = self.recovery.snapshot_every_steps
        for name in ("on_nan", "on_spike"):
            if getattr(self.bad_steps, name) is OnBadStep.ROLLBACK and every != 1:
                yield (
                    f"bad_steps.{name}",
                    "needs trainer.recovery.snapshot_every_steps = 1, which is "
                    f"{'null' if every is None else every}: a batch is rolled back to the snapshot of its "
                    "start",
                )
