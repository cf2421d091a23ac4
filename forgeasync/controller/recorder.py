"""Measures the time of each optimizer step, and records its metrics and rollouts.

``StepTimes`` measures how the training loop spends a step. ``RunRecorder`` collects the reports of all loops
between two steps. For each step it writes a line of metrics.jsonl, a few rollouts and a line on the console.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from forgeasync.buffer import Batch
from forgeasync.checkpoints import RunState
from forgeasync.config import RunConfig, is_served, max_token_age
from forgeasync.files import JsonLines
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.models import kernel_digest
from forgeasync.observability import (
    BadBatches,
    EndedEpisodes,
    EpisodeRecords,
    ExecutionLog,
    HeldOutScores,
    MeasuredSteps,
    MeasuredWindow,
    MetricsWriter,
    RecordedStep,
    RolloutWriter,
    RunDir,
    ScoredGroups,
    State,
    StepConsole,
    StepLine,
    TokenLines,
    WandbLog,
    batch_metrics,
    doing,
    num_steps_ahead,
    span,
)
from forgeasync.processes import MemoryMonitor, largest
from forgeasync.rollouts import EpisodeOutcome, Group, PromptEncoder, RolloutKey, Score, TokenPieces
from forgeasync.runtime import BufferReport
from forgeasync.trainer import StepResult
from forgeasync.weights import FetchReport, Manifest


class Part(StrEnum):
    """The parts of a step, in order; each is a span of the controller's trace."""

    WAIT = "wait for a batch"
    ASSIGN = "assign rows"
    TRAIN = "train"
    COMMIT = "commit"
    PUBLISH = "publish"
    EVALUATE = "evaluate"
    RECORD = "record"
    """First part after the step; this part and the following ones do not count toward the step's time."""
    DISK = "wait for the disk"
    CHECKPOINT = "begin a checkpoint"


_STATES = {
    Part.WAIT: State.WAITING_FOR_BATCH,
    Part.PUBLISH: State.PUBLISHING,
    Part.EVALUATE: State.EVALUATING,
}
"""Traced state of the controller in each part; in all other parts it counts as computing."""

_FIELDS = {
    Part.WAIT: "wait_for_batch_s",
    Part.ASSIGN: "controller_s",
    Part.TRAIN: "train_s",
    Part.COMMIT: "controller_s",
    Part.PUBLISH: "publish_weights_s",
    Part.EVALUATE: "eval_s",
    Part.RECORD: "record_s",
    Part.DISK: "wait_for_disk_s",
    Part.CHECKPOINT: "checkpoint_s",
}
"""Field of ``StepTimes`` that counts each part."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Measures the wall time of each part of a training step, in seconds."""

    step: int = 0
    step_s: float = 0.0
    """Time from construction to ``end``."""
    wait_for_batch_s: float = 0.0
    train_s: float = 0.0
    publish_weights_s: float = 0.0
    eval_s: float = 0.0
    """Time that training waited for an evaluation; 0 if it did not wait."""
    controller_s: float = 0.0
    """Time of the controller's own work: assigning rows, committing."""
    record_s: float = 0.0
    """Time after the step to gather reports of other processes and write the step's lines."""
    wait_for_disk_s: float = 0.0
    """Time after the step until the ledger and the step's lines were on the disk."""
    checkpoint_s: float = 0.0
    """Time after the step until a checkpoint was begun; 0 if none was."""
    _start_s: float = field(default_factory=lambda: time.perf_counter(), repr=False, compare=False)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time of the block as ``part``, and trace it."""
        state = _STATES.get(part)
        start_s = time.perf_counter()
        with nullcontext() if state is None else doing(state), span(part, {"step": self.step}):
            yield
        self._add(part, time.perf_counter() - start_s)

    def move(self, seconds: float, source: Part, target: Part) -> None:
        """Move ``seconds`` from the time of ``source`` to that of ``target``."""
        self._add(source, -seconds)
        self._add(target, seconds)

    def _add(self, part: Part, seconds: float) -> None:
        setattr(self, _FIELDS[part], getattr(self, _FIELDS[part]) + seconds)

    def end(self, *, has_evaluated: bool) -> None:
        """Set ``step_s``; set ``eval_s`` to 0 if training did not wait for an evaluation."""
        self.step_s = time.perf_counter() - self._start_s
        if not has_evaluated:
            self.eval_s = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the times of the step by their names in metrics.jsonl."""
        names = ("step_s", "wait_for_batch_s", "train_s", "publish_weights_s", "eval_s")
        return {f"time/{name}": getattr(self, name) for name in names}

    @property
    def wait_share(self) -> float:
        """Time spent waiting for a batch, as a share of waiting and training."""
        return self.wait_for_batch_s / (self.wait_for_batch_s + self.train_s)

    def longest(self) -> str:
        """Return the longest part of the step and its time, for the console."""
        parts = {
            "batch": self.wait_for_batch_s,
            "train": self.train_s,
            "publish": self.publish_weights_s,
            "eval": self.eval_s,
        }
        name = max(parts, key=parts.__getitem__)
        return f"{name} {parts[name]:.1f}/{self.step_s:.1f}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything that ``RunRecorder`` records of one step."""

    step: int
    batch: Batch
    result: StepResult
    times: StepTimes
    """Times of the step; those of the parts after it go into the next step's line."""
    engines: tuple[EngineStats, ...]
    """Statistics of each generator since its start."""
    buffer: BufferReport
    counters: Mapping[str, float]
    """Other counts since the run began, and current values, by metric name."""
    held_out: HeldOutScores | None
    """Evaluation that ended with or during this step, if any."""


class RunRecorder:
    """Writes metrics and a few rollouts of each step; a context manager that closes the files."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        console: StepConsole,
        resumed: RunState | None,
        *,
        prompts: PromptEncoder,
    ) -> None:
        """With ``resumed`` the run's clock continues; ``prompts`` has the tokenizer of the responses."""
        self.console = console
        tensorboard = run_dir.tensorboard if config.logging.tensorboard else None
        first_step = None if resumed is None else resumed.step + 1
        self._metrics = MetricsWriter(
            run_dir.metrics,
            tensorboard_dir=tensorboard,
            first_step=first_step,
            say=console.message,
            wandb=_wandb(config, run_dir, console),
        )
        self._records = None if config.environment is None else EpisodeRecords(run_dir.artifacts)
        self._rollouts = RolloutWriter(
            run_dir.rollouts, per_step=config.logging.rollouts_per_step, episodes=self._records
        )
        self._execution: ExecutionLog | None = None
        if config.record_execution:
            step = 0 if resumed is None else resumed.step
            self._execution = ExecutionLog(run_dir.execution, step=step, kernels=kernel_digest())
        self._tokens: TokenLines | None = None
        if config.logging.rollouts_per_step:
            keeps_texts = config.serving.keep_texts or not is_served(config)
            pieces = TokenPieces(prompts.tokenizer) if keeps_texts else None
            self._tokens = TokenLines(run_dir.tokens, pieces)
        self._window = MeasuredWindow.of_run(
            config.max_steps,
            num_steps_ahead=num_steps_ahead(
                max_off_policy_steps=config.max_off_policy_steps,
                max_groups=config.buffer.max_groups,
                groups_per_step=config.algorithm.groups_per_step,
            ),
        )
        self._start_s = time.perf_counter() - (0.0 if resumed is None else resumed.elapsed_s)
        self._times_before = StepTimes()
        self._bad_batches = BadBatches(run_dir.bad_steps, num_kept=config.trainer.bad_steps.num_kept)
        self._num_generated_before = 0
        self._num_dropped_before: Counter[str] = Counter()
        self._scored = ScoredGroups()
        self._episodes = None if config.environment is None else EndedEpisodes()
        self._max_token_age = max_token_age(config)
        self._publish_s: list[float] = []
        self._fetches: list[FetchReport] = []
        self._swaps: list[SwapReport] = []
        # On this host, processes of the other roles are descendants; they have their own metrics.
        self._memory = MemoryMonitor(with_descendants=False)

    def record_initial(self, held_out: HeldOutScores, eval_s: float, engines: Sequence[EngineStats]) -> None:
        """Record the evaluation before the first step, and start the run's clock."""
        self.console.message(f"step 0: {held_out}")
        self._warn_of_unscored(held_out)
        self._metrics.write_initial_evaluation(held_out, eval_s=eval_s)
        self._num_generated_before = _num_generated(engines)
        self._start_s = time.perf_counter()

    @property
    def files(self) -> tuple[JsonLines, ...]:
        """Files whose lines may wait for a full disk."""
        tokens = () if self._tokens is None else (self._tokens.lines,)
        execution = () if self._execution is None else (self._execution.lines,)
        return self._metrics.lines, self._rollouts.lines, *tokens, *execution

    def picks(self, step: int, groups: Sequence[Group]) -> frozenset[RolloutKey] | None:
        """Return the rollouts of a batch whose token values will be written; None if the run writes none."""
        if self._tokens is None:
            return None
        picked = ((group, group.rollouts[index]) for group, index in self._rollouts.picks(step, groups))
        return frozenset(
            RolloutKey(group_id=group.group_id, episode=rollout.episode, agent=rollout.agent)
            for group, rollout in picked
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run's clock started, including the time before the run was resumed."""
        return time.perf_counter() - self._start_s

    def warn(self, problem: str) -> None:
        """Report a problem on the console as refused."""
        self.console.message(f"refused: {problem}")

    def _warn_of_unscored(self, held_out: HeldOutScores) -> None:
        if num_unscored := held_out.num_unscored_in_all:
            self.warn(f"{num_unscored} held-out problems were not scored; they count for nothing")

    def record_scored(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        """Record a group's scores and response lengths, before any filter, for the next step's line."""
        self._scored.add(scores, lengths)

    def record_episodes(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Record all attempts at the episodes of a group, for the next step's line."""
        if outcomes:
            assert self._episodes is not None, "only environments have episodes"
            self._episodes.add(outcomes)

    def keep_records(self, group_id: int, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Keep the full episodes of a group until it is trained on or forgotten."""
        if outcomes:
            assert self._records is not None, "only environments have episodes"
            self._records.add(group_id, outcomes)

    def forget_records(self, group_ids: Iterable[int]) -> None:
        """Discard the episodes of groups that will not be trained on, with the files that they kept."""
        if self._records is not None:
            self._records.forget(group_ids)

    def record_publish(self, manifest: Manifest, publish_s: float) -> None:
        """Record a version and the time to publish it, mostly concurrent with training."""
        self._publish_s.append(publish_s)
        if self._execution is not None:
            self._execution.published(manifest.version, manifest.digest)

    def record_fetch(self, fetched: FetchReport) -> None:
        """Record a generator's fetch of a version, for the next step's line."""
        self._fetches.append(fetched)
        if not fetched.is_complete:
            self.console.message(
                f"the fetch of version {fetched.version} is incomplete: {fetched.num_bad_blocks} blocks "
                "failed their checksums; the generator keeps its weights"
            )

    def record_swap(self, swap: SwapReport) -> None:
        """Record a generator's swap to a new version, for the next step's line."""
        self._swaps.append(swap)

    def record(self, record: StepRecord) -> None:
        """Write the metrics, rollouts and console line of a step."""
        batch, result, times = record.batch, record.result, record.times
        if record.held_out is not None:
            self._warn_of_unscored(record.held_out)
        num_generated = _num_generated(record.engines)
        num_dropped = record.buffer.num_dropped
        metrics: dict[str, float | int] = {
            "step": record.step,
            "policy_version": result.policy_version,
            **batch_metrics(
                batch.groups, trained_version=result.policy_version - 1, max_token_age=self._max_token_age
            ),
            **({} if record.held_out is None else record.held_out.metrics()),
            "time/elapsed_s": self.elapsed_s,
            **times.metrics(),
            "throughput/train_tokens_per_s": result.num_targets / times.step_s,
            "throughput/generated_tokens_per_s": (num_generated - self._num_generated_before) / times.step_s,
            **{
                f"dropped/{reason}": count - self._num_dropped_before[reason]
                for reason, count in num_dropped.items()
            },
            **result.metrics,
        }
        if self._execution is not None:
            self._execution.trained(
                RecordedStep(
                    step=record.step,
                    draws=tuple(group.draw_id for group in batch.groups),
                    weights=batch.weights,
                    loss=result.metrics.get("loss"),
                    grad_norm=result.metrics.get("grad_norm"),
                    skip_reason=result.skip_reason,
                )
            )
        metrics["trainer/num_padding_tokens"] = result.num_padding_tokens
        metrics["throughput/computed_tokens_per_s"] = result.num_computed_tokens / times.step_s
        metrics["generator/busy_s"] = sum(engine.busy_s for engine in record.engines)
        metrics["generator/num_log_failures"] = sum(engine.num_log_failures for engine in record.engines)
        metrics["payload/bytes_per_token"] = sum(group.num_payload_bytes for group in batch.groups) / sum(
            rollout.num_tokens for group in batch.groups for rollout in group.rollouts
        )
        if result.skip_reason is not None:
            words = self._bad_batches.add(
                record.step,
                batch,
                reason=result.skip_reason,
                is_rolled_back=result.is_rolled_back,
                not_kept=result.not_kept,
            )
            self.console.message(words)
        metrics |= self._bad_batches.metrics()
        metrics |= {**record.buffer.metrics, **record.counters, **self._weight_metrics()}
        metrics["load/trainer_wait_share"] = times.wait_for_batch_s / times.step_s
        metrics |= self._scored.metrics()
        if self._episodes is not None:
            metrics |= self._episodes.metrics()
            self._episodes.end_step()
        if self._records is not None:
            metrics |= self._records.metrics()
        metrics |= self._memory_metrics(record)
        metrics["accounting/weight_max"] = max(batch.weights)
        before, self._times_before = self._times_before, times
        metrics["time/controller_s"] = times.controller_s + before.record_s
        metrics["time/wait_for_disk_s"] = before.wait_for_disk_s
        if before.checkpoint_s:
            metrics["time/checkpoint_s"] = before.checkpoint_s
        if self._tokens is not None:
            metrics |= self._tokens.prepare(record.step, result.tokens)
        self._window.add(metrics)
        self._metrics.write(metrics)
        written = self._rollouts.write(record.step, batch.groups)
        if self._tokens is not None:
            self._tokens.write()
        if self._records is not None:
            self._records.forget((group.group_id for group in batch.groups), written=written)
        self.console.now(metrics)
        self.console.step(StepLine(metrics=metrics, waited_for=times.longest()))
        self._num_generated_before = num_generated
        self._num_dropped_before = Counter(num_dropped)
        self._scored = ScoredGroups()
        self._publish_s.clear()
        self._fetches.clear()
        self._swaps.clear()

    def measured(self) -> MeasuredSteps | None:
        """Return means over the newest steps, which say what bounded the run's speed."""
        return self._window.measured()

    def _memory_metrics(self, record: StepRecord) -> dict[str, float]:
        """Return the peak memory of the largest process of each role; the scorer's is among the counters."""
        peaks = {
            "controller": self._memory.peak(),
            "trainer": record.result.memory,
            "generator": largest(engine.memory for engine in record.engines),
        }
        return {
            key: value
            for role, peak in peaks.items()
            if peak is not None
            for key, value in peak.metrics(role).items()
        }

    def _weight_metrics(self) -> dict[str, float]:
        """Return metrics of versions published, fetched and swapped since the last step."""
        return {
            "generator/max_pause_s": max((swap.pause_s for swap in self._swaps), default=0.0),
            "generator/max_swap_wait_s": max((swap.waited_s for swap in self._swaps), default=0.0),
            "generator/num_crossing": sum(swap.num_crossing for swap in self._swaps),
            "generator/num_resumed": sum(swap.num_resumed for swap in self._swaps),
            "generator/num_recomputed": sum(swap.num_recomputed for swap in self._swaps),
            "weights/num_swaps": len(self._swaps),
            "weights/max_publish_s": max(self._publish_s, default=0.0),
            "weights/max_fetch_s": max((fetch.fetch_s for fetch in self._fetches), default=0.0),
            "weights/num_bytes_moved": sum(fetch.num_bytes_moved for fetch in self._fetches),
            "weights/num_bytes_needed": sum(fetch.num_bytes_needed for fetch in self._fetches),
            "weights/num_bad_blocks": sum(fetch.num_bad_blocks for fetch in self._fetches),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._metrics.close()
        self._rollouts.close()
        if self._execution is not None:
            self._execution.lines.close()
        if self._tokens is not None:
            self._tokens.close()
        if self._records is not None:
            self._records.close()


def _wandb(config: RunConfig, run_dir: RunDir, console: StepConsole) -> WandbLog | None:
    if config.logging.wandb is None:
        return None
    return WandbLog(
        config.logging.wandb,
        run_dir.wandb,
        log_file=run_dir.log("wandb"),
        name=config.name,
        config=config.model_dump(mode="json"),
        say=console.message,
    )


def _num_generated(engines: Sequence[EngineStats]) -> int:
    return sum(engine.num_generated_tokens for engine in engines)
