"""The profile of a machine with a run's setup: service times of every part, as measured or as stated.

All times are of one proc that computes alone on its host, unless a field says otherwise: what procs cost each
other is modelled by who reads the profile (``cores``).
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forgeasync.profile.numbers import Distribution, Estimate
from forgeasync.schema import Count, CountOrZero, Procs, Section

FORMAT_VERSION = 8

Text = Annotated[str, Field(max_length=1000)]


class Origin(StrEnum):
    MEASURED = "measured"
    STATED = "stated"
    """Computed from what makers and papers state of hardware that is not here; ``sources`` says from what."""


class Hardware(Section):
    """What was measured, or what a stated profile is about."""

    host: Text
    num_cores: Procs
    """Cores that the run may use on each host."""
    cpu: Text
    gpus: tuple[Text, ...] = ()
    """Name of every GPU of a host."""
    packages: dict[str, Text]
    """Versions of what computes, such as torch and vllm, by name."""


class Setup(Section):
    """The parts of the config that the times depend on."""

    model: Text
    num_trainer_procs: Procs
    num_data_ranks: Procs
    """Ranks of the trainer that have rows of their own."""
    trainer_dtype: Text
    """What the trainer computes in."""
    num_replicas: Procs
    tensor_parallel: Procs
    generator_dtype: Text
    kv_block_tokens: Count
    """Tokens in a block of an engine's KV cache; only whole blocks of a prompt are shared."""


MOST_CROWDING = 1.0
"""Largest ``Cores.generator_crowding`` and ``trainer_crowding``: with more, what was measured was noise."""


MOST_LAG = 10.0
"""Largest ``Cores.trainer_lag``: with more, what was measured was noise."""


class Cores(Section):
    """Cores that a proc keeps busy while it computes; 0: it computes elsewhere, as on a GPU.

    Where the procs of one host want more than ``hardware.num_cores`` at once, all of them get the same share;
    those of the trainer get less.
    """

    trainer: float = Field(ge=0.0, le=65536.0)
    """All procs of the trainer together; one with more data ranks than ``setup`` keeps more of them busy."""
    generator: float = Field(ge=0.0, le=65536.0)
    scorer: float = Field(ge=0.0, le=65536.0)
    """One response that is being scored."""
    generator_crowding: float = Field(default=0.0, ge=0.0, le=MOST_CROWDING)
    """How much more processor time an engine takes for the same steps, by the share of time that others have
    its core: they use its caches meanwhile. With 0.5 it takes 1.25 times as much where others have half."""
    trainer_crowding: float = Field(default=0.0, ge=0.0, le=MOST_CROWDING)
    """The same of the trainer's procs. All others take as much as alone."""
    trainer_lag: float = Field(default=0.0, ge=0.0, le=MOST_LAG)
    """How much less of the cores the trainer gets where they are short. Its ranks wait for each other many
    times a step, and each for a core: where n others want the core that a proc has, they get
    1 / (1 + n * trainer_lag) of what others get."""


class DecodePoint(Section):
    """A decode step of one engine: every running sequence gets one token."""

    num_running: Count
    num_context_tokens: CountOrZero
    """Mean length of the running sequences so far, prompt included."""
    step_s: Estimate


class TrainPoint(Section):
    """An optimizer step, from the rows to the updated weights."""

    num_rows: Count
    """Rows of each data rank: microbatches."""
    num_tokens: Count
    """Tokens in the longest row of each microbatch, added up: what the slowest rank computes."""
    step_s: Estimate


class Lengths(Section):
    """Tokens of the prompts and responses of one source of data."""

    prompt: Distribution
    response: Distribution
    """Sampled tokens of one rollout; an episode's turns together."""
    prompt_share: float = Field(ge=0.0, le=1.0)
    """How alike the responses to one prompt are: the correlation within a group of the responses' normal
    scores. 0: as different as responses to two prompts, 1: all of the same length."""


class EnvironmentTimes(Section):
    """An environment's part of an episode."""

    num_turns: Distribution
    """Turns of the model in an episode."""
    latency_s: Distribution
    """Seconds from the end of one turn of the model to the beginning of the next, and to the score after the
    last one."""


class WeightTimes(Section):
    """A new version on its way, in the order of its parts."""

    wait_s: Distribution
    """Seconds after a step for which training waits to publish (``time/publish_weights_s``)."""
    publish_s: Distribution
    """Seconds from then until generators can fetch the version, beside the trainer's next step."""
    fetch_s: Distribution
    """Seconds that a host's generators take to fetch and stage it, beside decoding."""
    swap_s: Distribution
    """Seconds for which an engine stands still for it."""


class Profile(Section):
    """How long each part of a run takes."""

    format_version: Literal[8] = FORMAT_VERSION
    origin: Origin
    sources: tuple[Text, ...] = ()
    """Where stated figures come from."""
    measured_at: Text = ""
    """Date and time, ISO 8601; empty where nothing was measured."""
    hardware: Hardware
    setup: Setup
    cores: Cores
    decode: tuple[DecodePoint, ...] = Field(min_length=1, max_length=10_000)
    """A whole grid: every number of sequences with every length of context."""
    prefill_tokens_per_s: Estimate
    """Prompt tokens that one engine computes a second."""
    train: tuple[TrainPoint, ...] = Field(min_length=1, max_length=10_000)
    between_steps_s: Distribution
    """Seconds between two steps in which the trainer neither waits for a batch nor trains nor publishes nor
    evaluates: recording, planning rows, checkpoints."""
    call_s: Distribution
    """Seconds from the buffer's decision that a group may start to its first prefill."""
    weights: WeightTimes
    score_s: Distribution
    """Seconds for scoring one response, from when a scorer begins with it."""
    score_places: Procs
    """Responses that one scorer scores at once: its workers, or more where rewards wait for servers."""
    controller_s: Estimate
    """Processor seconds that the controller needs for one response, from the buffer's decision that its group
    may start to its score. The controller does one thing at a time."""
    loops_s: Estimate
    """Processor seconds that controller and buffer need for one response besides ``controller_s``: for
    batches, records, metrics. No response waits for this, but others may for the cores."""
    step_rest_s: Estimate
    """Processor seconds that an engine needs for one decode step besides ``decode``: for what others ask it
    meanwhile. 0 on a GPU, where a process that computes cannot be told from one that waits."""
    response_s: Estimate
    """Processor seconds that an engine needs for one response, or one turn of an episode, besides steps and
    prompts: for its arrays and records, in a thread of its own."""
    lengths: dict[str, Lengths] = Field(min_length=1, max_length=10_000)
    """By name of the source."""
    filtered_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of scored groups that the filters leave nothing of."""
    environment: EnvironmentTimes | None = None
    start_s: Estimate
    """Seconds from the command to the first step."""
    generator_start_s: Estimate
    """Seconds from the loss of a generator until another in its place is up."""
    trainer_start_s: Estimate
    """Seconds from the loss of a trainer rank until the step begins again."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        axes = (
            {one.num_running for one in self.decode},
            {one.num_context_tokens for one in self.decode},
        )
        cells = {(one.num_running, one.num_context_tokens) for one in self.decode}
        if len(cells) != len(self.decode) or len(cells) != len(axes[0]) * len(axes[1]):
            raise ValueError(
                f"decode: {len(self.decode)} points for {len(axes[0])} numbers of sequences and "
                f"{len(axes[1])} lengths of context; must have every pair of them once"
            )
        for field, mean in (
            *((f"decode[{index}].step_s", one.step_s.mean) for index, one in enumerate(self.decode)),
            *((f"train[{index}].step_s", one.step_s.mean) for index, one in enumerate(self.train)),
            ("prefill_tokens_per_s", self.prefill_tokens_per_s.mean),
        ):
            if mean <= 0.0:
                raise ValueError(f"{field}.mean = {mean:g}: must be more than 0")
        for name, lengths in self.lengths.items():
            if lengths.response.quantiles[0] < 1.0:
                raise ValueError(
                    f"lengths.{name}.response.quantiles[0] = {lengths.response.quantiles[0]:g}: must be at "
                    "least 1, as a response has a token"
                )
        if self.origin is Origin.STATED and not self.sources:
            raise ValueError("sources: must say where the figures of a stated profile come from")
        if self.origin is Origin.MEASURED and not self.measured_at:
            raise ValueError("measured_at: must have the time of a measured profile")
        return self
