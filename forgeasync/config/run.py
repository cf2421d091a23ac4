"""The config of one run, with the sections that belong to no single role."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.buffer import AccountingSection, BufferSection, PayloadSection
from forgeasync.config.data import MAX_TASKS, DataSection, NamedSource, named_sources
from forgeasync.config.environments import EnvironmentSection
from forgeasync.config.episodes import AgentSection, EpisodesSection
from forgeasync.config.evaluation import EvaluationSection, named_sets
from forgeasync.config.generator import GeneratorSection, SamplingSection
from forgeasync.config.launcher import LauncherSection, LocalLauncher
from forgeasync.config.model import LoraSection, ModelFacts, ModelSection
from forgeasync.config.plugin_sections import InstalledSource
from forgeasync.config.sandbox import Bubblewrap, SandboxSection
from forgeasync.config.serving import ServingSection
from forgeasync.config.teachers import TeacherSection
from forgeasync.config.trainer import OptimizerSection, RoutingReplay, TrainerSection
from forgeasync.config.weights import WeightsSection
from forgeasync.schema import Count, CountOrZero, Refusal, Seconds, Section, Seed


class TimeoutSection(Section):
    """Deadlines of calls to actors, in seconds. If a call takes longer, the run ends with an error, unless a
    field says otherwise."""

    setup_s: Seconds = 300.0
    generate_s: Seconds = 300.0
    train_step_s: Seconds = 600.0
    weights_s: Seconds = 120.0
    score_s: Seconds = 60.0
    """Time for scoring one response, or a whole group where a reward compares its responses, from when a
    scorer starts on it. After that the attempt has failed and is repeated, see ``scorer.max_attempts``."""
    episode_s: Seconds = 600.0
    """Time for one episode of an environment, from start to score. ``episodes.endings.timeout`` says what
    becomes of one that takes longer."""
    host_s: Seconds = 60.0
    """With several hosts: a host that does not answer for this long ends the run. A host that is not polled
    for twice this long shuts itself down."""
    controller_s: Seconds = 20.0
    """With ``--supervise``: a controller that gives no sign of life for this long, such as one that was
    stopped (SIGSTOP), is killed, and the run goes on from its newest checkpoint."""
    sigterm_s: Seconds = 30.0
    """Time for a checkpoint, which gets half of it, and the export of the weights when the run is told to
    stop by SIGTERM. The grace period before SIGKILL (Slurm's KillWait, Kubernetes'
    terminationGracePeriodSeconds, both 30 s by default) should be 20 s longer, so that processes can end.
    """


class ScorerSection(Section):
    """Scoring of groups, and the processes that verify answers."""

    num_replicas: int = Field(default=1, gt=0, le=256)
    """Number of scorers, each with ``num_workers`` processes of every reward. A response goes to the one with
    the least to do."""
    max_concurrent: int = Field(default=8, gt=0, le=1024)
    """Most finished groups that are scored at once. Others wait, and waiting does not count against
    ``score_s``. Responses of groups that are still being sampled are scored beside them."""
    max_in_flight: int = Field(default=16, gt=0, le=4096)
    """Most responses that are with one scorer at once; others wait in the queue. Rewards that wait for
    servers want more."""
    max_queued: int = Field(default=4096, gt=0, le=1048576)
    """Most responses that wait for a scorer. Those of unfinished groups are then scored with their group, and
    finished groups wait."""
    num_workers: int = Field(default=2, gt=0, le=256)
    """Number of processes of each scorer that verify answers, each one answer at a time."""
    answer_limit_s: float = Field(default=3.0, ge=0.01, le=3600.0)
    """Wall time for verifying one answer, in seconds. After that the answer scores 0 and is counted
    (``scoring/num_timeouts``)."""
    answer_memory_mib: int = Field(default=1024, ge=16, le=1048576)
    """Memory that verifying one answer may allocate, in MiB."""
    allow_weaker_isolation: bool = False
    """Whether answers may be verified behind weaker layers on a machine where bubblewrap does not work. By
    default such a machine is refused before the run starts. Namespaces, Landlock, limits and an audit hook
    remain, as far as the kernel has them."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Attempts at scoring a response; after this many failures its group is given up (``dropped/unscored``).
    What was lost with a scorer's process does not count."""
    max_lost: int = Field(default=6, gt=0, le=100)
    """A response during whose scoring a scorer's process was lost so often is given up: it may be what ends
    scorers. Less than ``max_restarts``."""
    max_unavailable_s: Seconds = 1800.0
    """Longest time that a response waits for what scores it, such as a judge's server that is down. After
    that its group is given up."""
    heartbeat_s: Seconds = 8.0
    """A scorer that does not answer for this long is killed and replaced."""
    max_restarts: int = Field(default=10, gt=0, le=1000)
    """Restarts of a scorer in a row, without a response that it has scored between them; after that the run
    ends."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find a response that could end the run."""
        if self.max_lost >= self.max_restarts:
            remedy = (
                f"must be less than scorer.max_restarts = {self.max_restarts}: a response that ends scorers "
            )
            yield "max_lost", f"{remedy}is to be given up before the run is"


class CheckpointSection(Section):
    """Checkpoints that a run can be resumed from: ``--resume latest``."""

    every_steps: Count | None = 20
    """Steps between two checkpoints, which are written while training goes on; null: no checkpoints."""
    keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    folder: str | None = None
    """Folder for checkpoints, which all trainer procs must see; null: ``checkpoints`` in the run's folder."""


class WandbMode(StrEnum):
    """Whether Weights & Biases is reached over the network."""

    ONLINE = "online"
    OFFLINE = "offline"
    """Files only; ``wandb sync`` sends them later."""


class WandbSection(Section):
    """Metrics for Weights & Biases, besides all other files. Logging in there is left to wandb."""

    project: str = Field(min_length=1, max_length=128)
    entity: str | None = None
    """User or team that the project belongs to; null: the user's default."""
    mode: WandbMode = WandbMode.ONLINE


class LoggingSection(Section):
    """Files that a run writes besides metrics.jsonl."""

    rollouts_per_step: CountOrZero = 4
    """Number of rollouts per step whose text is written to rollouts.jsonl."""
    tensorboard: bool = True
    wandb: WandbSection | None = None
    """null: Weights & Biases gets nothing. Needs the package wandb."""


Width = Annotated[int, Field(gt=0, le=65536)]


class ShapeSection(Section):
    """Sizes of a Qwen3-MoE built from a seed."""

    num_layers: int = Field(gt=0, le=1024)
    hidden_size: Width
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(gt=0, le=512, multiple_of=2)
    """Dimension of each head; even, because rotary embeddings rotate pairs."""
    num_experts: int = Field(gt=0, le=65535)
    """Experts per layer; routing records hold expert ids in 16 bits."""
    top_k: int = Field(gt=0, le=65535)
    expert_hidden_size: Width

    def find_problems(self) -> Iterator[Refusal]:
        """Find numbers that do not go together."""
        if self.top_k > self.num_experts:
            yield "top_k", f"must be at most warmup.shape.num_experts = {self.num_experts}"
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"must divide warmup.shape.num_heads = {self.num_heads}"


class WarmupSection(Section):
    """How ``python -m apps.warmup`` builds the model at ``model.path``: random initialization, then a short
    supervised run on generated worked examples."""

    seed: Seed = 0
    shape: ShapeSection
    num_steps: Count
    examples_per_step: Count
    optimizer: OptimizerSection
    direct_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """How often the model is taught to guess the answer instead of working it out. Guesses stand for
    pre-training text, which mostly gives answers directly; RL then has to discover that working pays."""
    guesses_per_step: Count | None = None
    """Number of examples of a step that guess. Each is weighted so that together they count as direct_share
    of the step: a few teach as much as many and take less time. null: direct_share of the examples."""
    guess_error: CountOrZero = 0
    """Largest error of a guess, and of a wrong step; errors are uniform."""
    wrong_step_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the steps of worked examples whose result is off; what follows goes on from it. RL then has to
    find the right result at every step. Not with a tool, which makes no errors."""
    shown_per_step: CountOrZero = 0
    """Number of examples of a step that are worked out behind the prompt of the run's teacher with
    ``$sibling``, which shows a right response: without such a past a small model makes nothing of what it is
    shown. They do not count for direct_share."""

    @property
    def num_guesses_per_step(self) -> int:
        if self.guesses_per_step is not None:
            return self.guesses_per_step
        return round(self.direct_share * (self.examples_per_step - self.shown_per_step))

    def find_problems(self) -> Iterator[Refusal]:
        """Find examples that do not fit in memory, and shares that cannot be kept."""
        if (num_examples := self.num_steps * self.examples_per_step) > MAX_TASKS:
            yield (
                "num_steps",
                f"times warmup.examples_per_step = {self.examples_per_step} is {num_examples}; must be at "
                f"most {MAX_TASKS}: all examples are held in memory",
            )
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
            remedy = "must be 0 with warmup.guess_error = 0: a wrong step is off by 1 to so many"
            yield "wrong_step_share", remedy


AgentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]


class RunConfig(Section):
    """The config of one run."""

    name: str
    """Name of the run; part of the names of its folder and its jobs."""
    seed: Seed = 0
    """Seed of all random draws; 32 bits, because vLLM passes its seed on to NumPy."""
    max_steps: Count
    """Number of training steps; each trains on one batch and publishes one policy version."""
    run_dir: str | None = None
    """Folder of this run; null: runs/<name>-<time>."""
    max_off_policy_steps: int = Field(default=0, ge=0, le=32)
    """Most off-policy steps: policy versions between the weights that sampled a token and the weights that
    train on it. 0: strictly synchronous."""
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
    """Multi-turn environment, which scores its own episodes: one that comes with the package, or a class of
    your own that is derived from ``Environment``, or an async function (task, agent). null: one prompt and
    one response, scored by ``data.reward``."""
    episodes: EpisodesSection = EpisodesSection()
    agents: dict[AgentName, AgentSection] | None = None
    """The environment's agents by name, at least one of them trained, if it has several: ``rollout`` then
    gets all of them. null: one agent."""
    sandbox: SandboxSection = Bubblewrap()
    """Where environments run code that the model wrote."""
    serving: ServingSection = ServingSection()
    """How people are served, in runs with ``data.source: {kind: served}``."""
    evaluation: EvaluationSection
    logging: LoggingSection = LoggingSection()
    timeouts: TimeoutSection = TimeoutSection()
    launcher: LauncherSection = LocalLauncher()
    warmup: WarmupSection | None = None


def is_served(config: RunConfig) -> bool:
    """Return whether people bring the run's tasks, over HTTP."""
    source = config.data.source
    return isinstance(source, InstalledSource) and source.serves_people


def all_sources(config: RunConfig) -> tuple[NamedSource, ...]:
    """Return the sources of training problems, then those of evaluation sets."""
    return *named_sources(config.data), *named_sets(config.evaluation)


def longest_response(config: RunConfig) -> int:
    """Return the most tokens that can follow the first prompt; turns of an episode can fill the context."""
    if config.environment is not None:
        return config.model.max_context_length
    return config.sampling.max_response_tokens


def num_groups_held(config: RunConfig) -> int:
    """Return the most groups whose rollouts stay for the trainer: those of batches between two snapshots."""
    return config.algorithm.groups_per_step * (config.trainer.recovery.snapshot_every_steps or 1)


def resolve(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """Return the config as the run uses it: without routing replay if the model has no experts."""
    if facts.num_experts:
        return config
    changes = {"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
