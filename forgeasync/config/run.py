"""The config of one run, and the sections that are not specific to one role."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.buffer import AccountingSection, AgeOf, BufferSection, PayloadSection
from forgeasync.config.data import (
    MAX_TASKS,
    DataSection,
    EvaluationSection,
    NamedSource,
    named_sets,
    named_sources,
)
from forgeasync.config.environments import AgentSection, EnvironmentSection, EpisodesSection, ServingSection
from forgeasync.config.generator import GeneratorSection, SamplingSection
from forgeasync.config.launcher import LauncherSection, LocalLauncher
from forgeasync.config.model import LoraSection, ModelFacts, ModelSection
from forgeasync.config.plugin_sections import InstalledSource
from forgeasync.config.sandbox import Bubblewrap, SandboxSection
from forgeasync.config.teachers import TeacherSection
from forgeasync.config.trainer import OptimizerSection, RoutingReplay, TrainerSection
from forgeasync.config.weights import WeightsSection
from forgeasync.schema import Count, CountOrZero, Refusal, Seconds, Section, Seed


class Fidelity(StrEnum):
    """How closely the trainer's log-probabilities follow the generator's."""

    REPLAY = "replay"
    """Recorded experts and kept sets are replayed; rounding differs."""
    BITWISE = "bitwise"
    """Trainer and generator compute equal log-probabilities, to the last bit, with the same weights."""


class TimeoutSection(Section):
    """Deadlines of calls to actors, in seconds.

    If a call takes longer, its process is replaced or its work is repeated where that is possible, as
    docs/failures.md lists. Otherwise the run ends with an error.
    """

    setup_s: Seconds = 300.0
    """Time limit for starting the processes of a role and loading its model."""
    generate_s: Seconds = 300.0
    """Time limit for sampling a group, or one turn of an episode."""
    train_step_s: Seconds = 600.0
    """Time limit for one training step."""
    weights_s: Seconds = 120.0
    """Time limit for publishing or fetching one policy version."""
    score_s: Seconds = 60.0
    """Time limit for scoring one response, or a whole group if a reward compares its responses, from when a
    scorer starts on it. After that the attempt fails and is repeated, see ``scorer.max_attempts``."""
    episode_s: Seconds = 600.0
    """Time limit for one episode of an environment, from start to score. ``episodes.endings.timeout`` is the
    policy for an episode that takes longer."""
    host_s: Seconds = 60.0
    """Time without an answer from a host after which a run on several hosts ends. A host that is not polled
    for twice this long shuts itself down."""
    controller_s: Seconds = 20.0
    """Time without a heartbeat after which ``--supervise`` kills a controller, such as one stopped by
    SIGSTOP, and resumes the run from its newest checkpoint."""
    sigterm_s: Seconds = 30.0
    """Time limit after Ctrl-C or SIGTERM for a checkpoint, which gets half of it, and the export of the
    weights. Make the grace period before SIGKILL 20 s longer, so that processes can end (Slurm's KillWait,
    Kubernetes' terminationGracePeriodSeconds; both are 30 s by default)."""


class ScorerSection(Section):
    """Settings of the scorers, and of the processes that verify answers."""

    num_replicas: int = Field(default=1, gt=0, le=256)
    """Number of scorers, each with ``num_workers`` processes per reward. A response goes to the least busy
    scorer."""
    max_in_flight: int = Field(default=16, gt=0, le=4096)
    """Maximum number of responses that one scorer handles at once; others wait in the queue. Rewards that
    wait for servers need a larger number."""
    num_workers: int = Field(default=2, gt=0, le=256)
    """Number of processes of each scorer that verify answers, one answer at a time each."""
    answer_limit_s: float = Field(default=3.0, ge=0.01, le=3600.0)
    """Wall time limit for verifying one answer, in seconds. After that the answer scores 0 and is counted
    (``scoring/num_timeouts``)."""
    answer_memory_mib: int = Field(default=1024, ge=16, le=1048576)
    """Memory that verifying one answer may allocate, in MiB."""
    allow_weaker_isolation: bool = False
    """Verify answers with weaker isolation on a machine where bubblewrap does not work: namespaces, Landlock,
    limits and an audit hook, as far as the kernel has them. By default, a run does not start on such a
    machine."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Maximum number of attempts at scoring a response; then its group is given up (``dropped/unscored``).
    Attempts that were lost with a scorer's process do not count."""
    max_lost: int = Field(default=6, gt=0, le=100)
    """Number of scorer processes lost while scoring a response after which the response is given up, since it
    may be the cause. Less than ``max_restarts``."""
    max_unavailable_s: Seconds = 1800.0
    """Maximum time that a response waits for an unavailable reward, such as a judge's server that is down.
    After that its group is given up."""
    heartbeat_s: Seconds = 8.0
    """Time without an answer after which a scorer is killed and replaced."""
    max_restarts: int = Field(default=10, gt=0, le=1000)
    """Maximum number of restarts of a scorer in a row without a scored response between them; after that the
    run ends."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield a ``max_lost`` with which one response could end the run."""
        if self.max_lost >= self.max_restarts:
            remedy = (
                f"must be less than scorer.max_restarts = {self.max_restarts}: one response could end the run"
            )
            yield "max_lost", remedy


class CheckpointSection(Section):
    """Checkpoints, from which ``--resume latest`` resumes a run."""

    every_steps: Count | None = 20
    """Steps between two checkpoints, which are written while training continues; null: no checkpoints."""
    keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    folder: str | None = None
    """Folder of checkpoints, which all trainer processes must see; null: ``checkpoints`` in the run's
    folder."""


class WandbMode(StrEnum):
    """Whether metrics are sent to Weights & Biases during the run."""

    ONLINE = "online"
    OFFLINE = "offline"
    """Metrics are written to files; ``wandb sync`` uploads them later."""


class WandbSection(Section):
    """Logging to Weights & Biases, in addition to the run's files; wandb handles the login."""

    project: str = Field(min_length=1, max_length=128)
    """Project that the run is logged to."""
    entity: str | None = None
    """User or team that owns the project; null: the user's default."""
    mode: WandbMode = WandbMode.ONLINE


class LoggingSection(Section):
    """Logs that a run writes in addition to metrics.jsonl."""

    rollouts_per_step: CountOrZero = 4
    """Number of rollouts per step whose text is written to rollouts.jsonl."""
    tensorboard: bool = True
    """Write metrics for TensorBoard, to ``tensorboard`` in the run's folder."""
    wandb: WandbSection | None = None
    """Logging to Weights & Biases, which needs the package wandb; null: none."""


Width = Annotated[int, Field(gt=0, le=65536)]


class ShapeSection(Section):
    """Shape of a Qwen3-MoE or Qwen3.5-MoE model that is initialized from a seed."""

    num_layers: int = Field(gt=0, le=1024)
    """Number of layers."""
    hidden_size: Width
    """Dimension of the hidden states."""
    num_heads: int = Field(gt=0, le=1024)
    """Number of query heads."""
    num_kv_heads: int = Field(gt=0, le=1024)
    """Number of key and value heads; must divide ``num_heads``."""
    head_dim: int = Field(gt=0, le=512, multiple_of=2)
    """Dimension of each head; even, because rotary embeddings rotate pairs."""
    num_experts: int = Field(gt=0, le=65535)
    """Experts per layer; routing records hold expert ids in 16 bits."""
    top_k: int = Field(gt=0, le=65535)
    """Number of experts chosen for each token."""
    expert_hidden_size: Width
    """Hidden dimension of each expert."""
    full_attention_interval: Count | None = None
    """Makes a Qwen3.5-MoE: every this many layers, one has full attention. The others have the gated delta
    rule, with ``num_heads`` heads of queries and keys and twice as many of values, as published models have.
    null: a Qwen3-MoE."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield inconsistent numbers of experts, heads and layers."""
        if (self.full_attention_interval or 1) > self.num_layers:
            remedy = f"must be at most warmup.shape.num_layers = {self.num_layers}"
            yield "full_attention_interval", remedy
        if self.top_k > self.num_experts:
            yield "top_k", f"must be at most warmup.shape.num_experts = {self.num_experts}"
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"must divide warmup.shape.num_heads = {self.num_heads}"


class WarmupSection(Section):
    """Settings of ``python -m apps.warmup``, which builds the model at ``model.path``.

    The model is initialized randomly, then briefly trained with supervision on generated worked examples.
    """

    seed: Seed = 0
    """Seed of the initial weights and the examples."""
    shape: ShapeSection
    num_steps: Count
    """Number of optimizer steps."""
    examples_per_step: Count
    """Number of examples in the batch of one step."""
    optimizer: OptimizerSection
    direct_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Weight share of examples that guess the answer instead of working it out. Guesses imitate pre-training
    text, which mostly gives answers directly; RL then has to discover that working out the answer pays."""
    guesses_per_step: Count | None = None
    """Number of examples per step that guess. They are weighted so that together they have direct_share of
    the step's weight: a few teach as much as many and take less time. null: direct_share of the examples."""
    guess_error: CountOrZero = 0
    """Maximum error of a guess, and of a wrong step; errors are uniformly distributed."""
    wrong_step_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the steps in worked examples whose result is wrong; the following steps continue from the
    wrong result. RL then has to learn the right result of every step. Must be 0 with an environment, whose
    tool makes no errors."""
    shown_per_step: CountOrZero = 0
    """Number of examples per step whose prompt is that of the run's teacher with ``$sibling``, which shows a
    correct response. A small model cannot use a shown response without such training. These examples do not
    count for direct_share."""

    @property
    def num_guesses_per_step(self) -> int:
        """Number of examples of each step that guess: ``guesses_per_step`` or its default."""
        if self.guesses_per_step is not None:
            return self.guesses_per_step
        return round(self.direct_share * (self.examples_per_step - self.shown_per_step))

    def find_problems(self) -> Iterator[Refusal]:
        """Yield examples that do not fit in memory, and inconsistent shares."""
        if self.num_steps * self.examples_per_step > MAX_TASKS:
            times = f"times warmup.examples_per_step = {self.examples_per_step}"
            yield "num_steps", f"{times} must be at most {MAX_TASKS}: all examples are held in memory"
        guesses = self.num_guesses_per_step
        if not self.direct_share and guesses:
            remedy = "must be left out with warmup.direct_share = 0: guesses would count for nothing"
            yield "guesses_per_step", remedy
        elif guesses >= self.examples_per_step or (self.direct_share and not guesses):
            yield (
                "guesses_per_step",
                f"must be at least 1 and less than warmup.examples_per_step = {self.examples_per_step}: with "
                f"warmup.direct_share = {self.direct_share:g}, some examples guess and some are worked out",
                guesses,
            )
        if self.wrong_step_share and not self.guess_error:
            remedy = "must be 0 with warmup.guess_error = 0: it is the maximum error of a wrong step"
            yield "wrong_step_share", remedy


AgentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]


class RunConfig(Section):
    """The config of one run."""

    name: str
    """Name of the run; part of the names of its folder and its jobs."""
    seed: Seed = 0
    """Seed of all random draws; 32 bits, because vLLM passes its seed to NumPy."""
    max_steps: Count
    """Number of training steps; each trains on one batch and publishes one policy version."""
    run_dir: str | None = None
    """Folder of this run; null: runs/<name>-<time>."""
    max_off_policy_steps: int = Field(default=0, ge=0, le=32)
    """Maximum age of training data: policy versions between the weights that sampled a token and the weights
    that train on it. 0: strictly synchronous."""
    fidelity: Fidelity = Fidelity.REPLAY
    """replay: The trainer replays recorded experts and kept sets; rounding differs. bitwise: For tokens that
    were sampled under the weights that train, log-probabilities of trainer and generator are also equal to
    the last bit. A difference ends the run. CPUs compute in float32, GPUs in bfloat16."""
    record_execution: bool = False
    """Keep the files of all groups that train and a line for each step, so that ``python -m apps.reexecute``
    can execute the run again, bit for bit. Needs ``fidelity: bitwise``."""
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
    teachers: dict[AgentName, TeacherSection] = Field(default_factory=dict)
    """Teachers by name, for terms of the loss that need one."""
    environment: EnvironmentSection | None = None
    """Multi-turn environment, which scores its own episodes: a built-in or installed one, your own class
    derived from ``Environment``, or your own async function (task, agent). null: one prompt and one response,
    scored by ``data.reward``."""
    episodes: EpisodesSection = EpisodesSection()
    agents: dict[AgentName, AgentSection] | None = None
    """Agents of an environment with several agents, by name; at least one is trained. ``rollout`` receives
    all of them. null: one agent."""
    sandbox: SandboxSection = Bubblewrap()
    """Sandbox in which environments run code of the model."""
    serving: ServingSection = ServingSection()
    """Settings for serving people, in runs with ``data.source: {kind: served}``."""
    evaluation: EvaluationSection
    logging: LoggingSection = LoggingSection()
    timeouts: TimeoutSection = TimeoutSection()
    launcher: LauncherSection = LocalLauncher()
    """Where the processes of the run start: on this machine, or on the hosts of a cluster."""
    warmup: WarmupSection | None = None


def is_served(config: RunConfig) -> bool:
    """Return whether people submit the run's tasks over HTTP."""
    source = config.data.source
    return isinstance(source, InstalledSource) and source.serves_people


def all_sources(config: RunConfig) -> tuple[NamedSource, ...]:
    """Return the sources of training problems, then those of evaluation sets."""
    return *named_sources(config.data), *named_sets(config.evaluation)


def max_token_age(config: RunConfig) -> int | None:
    """Return the age up to which single tokens train; None: all tokens of a batch do."""
    return config.max_off_policy_steps if config.buffer.age_of is AgeOf.TOKEN else None


def longest_response(config: RunConfig) -> int:
    """Return the maximum number of tokens after the first prompt; an episode can fill the whole context."""
    if config.environment is not None:
        return config.model.max_context_length
    return config.sampling.max_response_tokens


def num_groups_held(config: RunConfig) -> int:
    """Return the maximum number of groups kept for the trainer: those of the batches between two
    snapshots."""
    return config.algorithm.groups_per_step * (config.trainer.recovery.snapshot_every_steps or 1)


def resolve(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """Return the config that the run uses: without routing replay if the model has no experts.

    Prefixes are shared by default only if layers have neither states nor windows.
    """
    changes: dict[str, object] = {}
    if (facts.linear is not None or facts.window) and config.trainer.share_prefixes is None:
        changes["share_prefixes"] = False
    if not facts.num_experts:
        changes |= {"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
