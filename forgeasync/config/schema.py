"""The typed schema of a run: every key a YAML file may hold, its type, its range and what it means.

Rules that one field can decide alone are types and bounds here; rules across fields live in
``forgeasync.config.checks``. Data and rewards are in ``data_schema`` and ``reward_schema``, the ``algorithm``
section is in ``forgeasync.config.algorithm``, where procs run in ``launch_schema``.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.buffer_schema import AccountingSection, BufferSection, PayloadSection
from forgeasync.config.data_schema import DataSection
from forgeasync.config.evaluation_schema import EvaluationSection, SamplingSection
from forgeasync.config.launch_schema import LauncherSection, LocalLauncher
from forgeasync.config.python_code import PythonCode
from forgeasync.config.scorer_schema import ScorerSection
from forgeasync.config.section import (
    Count,
    CountOrZero,
    Gibibytes,
    Procs,
    Section,
    Seed,
)
from forgeasync.config.timeout_schema import TimeoutSection
from forgeasync.config.weights_schema import WeightsSection


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


MAX_ROW_TOKENS = 2**22
"""Rotary tables for every position of a row are built with the model: 2 GiB at this length."""


class ModelSection(Section):
    """Which model is trained and sampled from."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer.json) or hub id; the trainer, the
    generators and the tokenizer all read this one place."""
    max_context_length: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Longest prompt plus response, in tokens."""


class GeneratorSection(Section):
    """The generator mesh: vLLM engines behind a router."""

    num_replicas: Procs = 1
    """Engines; each lives in its own Monarch proc."""
    tensor_parallel: Procs = 1
    """GPUs per engine."""
    expert_parallel: bool = False
    """An engine's GPUs hold different experts, instead of a slice of every expert each."""
    dtype: Dtype = Dtype.FLOAT32
    max_num_seqs: int = Field(default=64, gt=0, le=65536)
    """Sequences an engine decodes at once."""
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=MAX_ROW_TOKENS)
    """Tokens in one forward pass of the engine (chunked prefill splits longer prompts)."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of one engine process."""
    compile: bool = False
    """torch.compile and (on GPUs) CUDA graphs; off means eager."""
    batch_invariant: bool = False
    """A response's tokens and log-probabilities do not depend on what else is decoded, to the last bit, at
    some cost in speed: a synchronous run then has the same losses every time, interrupted or not."""


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
    """Which tokens' experts the trainer takes from the sampler's record (Keep Routing)."""

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
    """The softmax runs over the tokens that the sampler kept (top-k, top-p, min-p), and only over them."""
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
    log-probabilities that differ from the sampler's by more than this on average, in nats."""
    optimizer: OptimizerSection

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return RoutingReplay.OFF if value is False else value


MAX_LORA_RANK = 512


class LoraSection(Section):
    """Train low-rank adapters of a frozen base model instead of its weights; only they travel."""

    rank: int = Field(gt=0, le=MAX_LORA_RANK)
    """vLLM serves adapters up to this rank."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """An adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Last part of the names of the linear layers to adapt, such as ``q_proj`` or ``down_proj``; of an MoE
    projection every expert gets an adapter of its own."""


class CheckpointSection(Section):
    """Checkpoints that a run can be resumed from: ``--resume latest``."""

    every_steps: Count | None = 20
    """One is written after every this many steps, beside training; null: none."""
    keep: Count = 2
    """The newest ones that are kept."""
    folder: str | None = None
    """Where they lie; null: ``checkpoints`` in the run's folder. All trainer procs have to see it."""


class LoggingSection(Section):
    """What a run writes besides its metrics."""

    rollouts_per_step: CountOrZero = 4
    """Rollouts with text written to rollouts.jsonl each step."""
    tensorboard: bool = True


Width = Annotated[int, Field(gt=0, le=65536)]


class ShapeSection(Section):
    """Sizes of a Qwen3-MoE built from a seed."""

    num_layers: int = Field(gt=0, le=1024)
    hidden_size: Width
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(gt=0, le=512, multiple_of=2)
    """Even: rotary positions turn pairs."""
    num_experts: int = Field(gt=0, le=65535)
    """Routing records hold experts' ids as 16-bit numbers at most."""
    top_k: int = Field(gt=0, le=65535)
    expert_hidden_size: Width


class WarmupSection(Section):
    """How ``python -m apps.warmup`` builds the model at ``model.path``: random init, then a short
    supervised run on generated worked examples."""

    seed: Seed = 0
    shape: ShapeSection
    num_steps: Count
    examples_per_step: Count
    optimizer: OptimizerSection
    direct_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the examples that guess the answer instead of working it out: the stand-in for text in the
    wild, which mostly does. RL then has to find out that working pays."""
    guess_error: CountOrZero = 0
    """A guess is off by up to this much, uniformly."""


class RunConfig(Section):
    """One run."""

    name: str
    """Part of the names of its folder and of its jobs."""
    seed: Seed = 0
    """All random draws follow from it. NumPy takes 32 bits, and vLLM hands its seed on to NumPy."""
    max_steps: Count
    """Optimizer steps."""
    run_dir: str | None = None
    """Folder of this run; by default runs/<name>-<time>."""
    max_off_policy_steps: int = Field(default=0, ge=0, le=32)
    """Most versions between the weights that sampled a token and the weights trained on it. 0 is
    strictly synchronous."""
    model: ModelSection
    data: DataSection
    sampling: SamplingSection
    generator: GeneratorSection = GeneratorSection()
    trainer: TrainerSection
    algorithm: AlgorithmSection
    buffer: BufferSection = BufferSection()
    accounting: AccountingSection = AccountingSection()
    payload: PayloadSection = PayloadSection()
    weights: WeightsSection = WeightsSection()
    lora: LoraSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    scorer: ScorerSection = ScorerSection()
    environment: PythonCode | None = None
    """What the model works in: a class derived from ``Environment`` or an async function (task, agent). It
    scores its episodes itself. null: one prompt and one response, scored by the data's verifier."""
    evaluation: EvaluationSection
    logging: LoggingSection = LoggingSection()
    timeouts: TimeoutSection = TimeoutSection()
    launcher: LauncherSection = LocalLauncher()
    warmup: WarmupSection | None = None
