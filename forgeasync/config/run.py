"""One run: all its sections, and those that belong to no role."""

from typing import Annotated

from pydantic import Field

from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.buffer import AccountingSection, BufferSection, PayloadSection
from forgeasync.config.data import DataSection
from forgeasync.config.evaluation import EvaluationSection
from forgeasync.config.generator import GeneratorSection, SamplingSection
from forgeasync.config.launcher import LauncherSection, LocalLauncher
from forgeasync.config.model import LoraSection, ModelSection
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.trainer import OptimizerSection, RoutingReplay, TrainerSection
from forgeasync.config.weights import WeightsSection
from forgeasync.schema.python_code import PythonCode
from forgeasync.schema.section import Count, CountOrZero, Seconds, Section, Seed


class TimeoutSection(Section):
    """Deadlines of actor calls, in seconds. Past one, the run ends with an error."""

    setup_s: Seconds = 300.0
    generate_s: Seconds = 300.0
    train_step_s: Seconds = 600.0
    weights_s: Seconds = 120.0
    score_s: Seconds = 60.0
    """For one group, from when the scorer begins with it: past it, the attempt has failed, see ``scorer``."""
    episode_s: Seconds = 600.0
    """For one episode of an environment, from its start to its score: past it, its group is given up."""
    host_s: Seconds = 60.0
    """Of many hosts: one that does not answer for this long ends the run, and one that is not asked for twice
    this long ends itself."""
    sigterm_s: Seconds = 30.0
    """What a run that is told to stop (SIGTERM) takes at most for a checkpoint, which gets half of it, and
    for the export of its weights. What kills it afterwards (KillWait of Slurm, terminationGracePeriodSeconds
    of Kubernetes, both 30 s by default) should leave 20 s more, in which its processes end.
    """


class ScorerSection(Section):
    """Scoring of groups, and the processes that verify answers."""

    max_concurrent: int = Field(default=8, gt=0, le=1024)
    """Groups that are with the scorer at once; others wait, and waiting counts against no limit."""
    num_workers: int = Field(default=2, gt=0, le=256)
    """Processes that verify answers, each one answer at a time."""
    answer_limit_s: float = Field(default=3.0, ge=0.01, le=3600.0)
    """Wall time for one answer; past it, the answer scores 0 and is counted (``scoring/num_timeouts``)."""
    answer_memory_mib: int = Field(default=1024, ge=16, le=1048576)
    """What the verification of one answer may allocate."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """A group whose scoring fails this often is given up (``dropped/unscored``)."""


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
    """How often the model is taught to guess the answer instead of working it out: the stand-in for text in
    the wild, which mostly does. RL then has to find out that working pays."""
    guesses_per_step: Count | None = None
    """Examples of a step that guess, each of which counts as often as makes all of them direct_share of the
    step: a few teach as much as many, and take less time. null: direct_share of the examples."""
    guess_error: CountOrZero = 0
    """A guess is off by up to this much, uniformly."""

    @property
    def num_guesses_per_step(self) -> int:
        if self.guesses_per_step is not None:
            return self.guesses_per_step
        return round(self.direct_share * self.examples_per_step)


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


def longest_response(config: RunConfig) -> int:
    """Most tokens after the first prompt: the turns of an episode can fill the context."""
    if config.environment is not None:
        return config.model.max_context_length
    return config.sampling.max_response_tokens


def resolve(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """The config as the run uses it: a model without experts has no routing to record and replay."""
    if facts.num_experts:
        return config
    changes = {"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
