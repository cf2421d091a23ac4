"""What a run records: metrics.jsonl (numbers, one object per step) and rollouts.jsonl (texts).

Keys of metrics.jsonl; all are on every line but those marked *:

| key                                  | meaning                                                           |
|--------------------------------------|-------------------------------------------------------------------|
| `step`                               | optimizer steps done; 0 only for the evaluation before training   |
| `policy_version`                     | version of the weights that this step made                        |
| `reward/mean`, `reward/std`          | over the rollouts of the batch (population standard deviation)    |
| `reward/<part>` *                    | mean of a part of the scores, by its name, over the rollouts of   |
|                                      | the batch whose reward says it; see docs/rewards.md               |
| `eval/accuracy` *                    | share of held-out problems solved; only where a step evaluated    |
| `eval/score_mean` *                  | mean score of the same responses, partial credit included         |
| `eval/reward/<part>` *               | mean of a part of these scores, by its name                       |
| `eval/<set>/<...>` *                 | the same metrics of a set of `evaluation.sets`                    |
| `eval/num_unscored` *                | held-out responses that could not be scored: they are left out of |
|                                      | both; where all are, neither is there                             |
| `time/elapsed_s`                     | since the first training step started, excluding nothing          |
| `time/step_s`                        | the whole step, evaluation included                               |
| `time/wait_for_batch_s`              | the trainer stood idle for the batch                              |
| `time/train_s`                       | forward, backward and optimizer                                   |
| `time/publish_weights_s`             | until the new weights were staged and training could go on        |
| `time/eval_s`                        | evaluation; 0 on steps without one                                |
| `throughput/train_tokens_per_s`      | response tokens trained on per `time/step_s`                      |
| `throughput/generated_tokens_per_s`  | response tokens generated during the step per `time/step_s`       |
| `off_policy/age_mean`                | versions between the weights that sampled a token and the weights |
|                                      | that it was trained on (`policy_version` - 1), mean over tokens   |
| `off_policy/age_max`                 | the same, for the oldest token                                    |
| `off_policy/effective_sample_share`  | what the batch is worth under the current policy: (sum w)^2 /     |
|                                      | (n * sum w^2) of the tokens' ratios current / behavior            |
| `off_policy/rejected_token_share` *  | response tokens too old to be trained on; where there is a limit  |
| `mismatch/logprob_abs_mean`          | abs(trainer logprob - sampler logprob), mean over tokens, in nats |
| `mismatch/logprob_abs_max`           | the same, for the worst token                                     |
| `mismatch/kl`                        | estimate of KL(sampler, trainer), mean over tokens, in nats; a    |
|                                      | difference counts up to 20                                        |
| `mismatch/fresh_logprob_abs_mean` *  | like `logprob_abs_mean`, over responses wholly of age 0           |
| `response/length_mean`, `_min`, `_max` | sampled tokens per response, over all turns of an episode       |
| `response/truncated_share`           | share of responses cut at `sampling.max_response_tokens`; of      |
|                                      | episodes: whose last turn was cut, or whose context was full      |
| `environment/mean_turns` *           | turns of the model in an episode, and                             |
| `environment/mean_episode_s` *       | seconds that one took: means over the episodes of training that   |
|                                      | ended during the step; only with an environment, like the next    |
| `environment/num_truncated` *        | episodes of training so far that ended because the context was    |
|                                      | full: their score is 0                                            |
| `dropped/<reason>` *                 | groups lost during the step, by reason                            |
| `reward/scored_mean` *               | over all rollouts scored during the step, before any filter       |
| `group/all_correct_share` *          | groups scored during the step all of whose responses are correct; |
| `group/all_wrong_share` *            | none of them: neither teaches a group-relative advantage anything |
| `response/length_mean_correct` *     | tokens of the responses scored during the step that are correct;  |
| `response/length_mean_wrong` *       | and of the others                                                 |
| `response/no_answer_share` *         | of these, responses that state no answer, where the reward tells  |
| `scoring/num_timeouts`, `_crashes`,  | answers so far that scored 0 since they could not be verified: in |
| `_errors`, `_oversized`              | `scorer.answer_limit_s`, without the death of the process, without |
|                                      | an exception of the verifier, or for their length                 |
| `scoring/num_killed_rewards`         | processes of own rewards so far that were killed over a call that |
|                                      | did not end                                                       |
| `scoring/num_failed_attempts`        | to score a group so far; each group has `scorer.max_attempts`     |
| `filtered/num_groups_<reason>`       | groups that filters dropped so far                                |
| `filtered/num_rollouts`              | rollouts that filters left out so far                             |
| `buffer/num_in_flight`, `_complete`  | groups being sampled or scored, and waiting for training          |
| `buffer/num_reissued`                | prompts so far that came again for a lost group                   |
| `buffer/num_restarted`               | prompts so far whose groups were lost when a run was interrupted  |
| `time/checkpoint_s` *                | training stood still for the checkpoint of the step before        |
| `load/bound`                         | most groups that may be under way now                             |
| `load/trainer_wait_share`            | of `time/step_s`, waiting for the batch                           |
| `load/trainer_waits`, `_generators_wait` | 1 where that side waits for the other                         |
| `accounting/length_distance` *       | total variation between the lengths of rollouts as submitted and  |
|                                      | as effectively trained, by powers of two, over the trailing       |
|                                      | `accounting.metric_groups` groups; `source_distance`: by source   |
| `accounting/mean_length_ratio` *     | mean length as trained over the one as submitted                  |
| `accounting/length_share_ratio_<n>` * | trained share over submitted share, of n to 2n - 1 tokens        |
| `accounting/effective_groups_share` * | sum of trained weights over submitted groups                     |
| `accounting/outstanding_deficit`     | weight of lost groups that no other has taken over yet            |
| `accounting/num_censored`            | groups so far lost before their lengths were known                |
| `accounting/weight_max`              | largest weight of the batch's groups                              |
| `trainer/num_optimizer_steps`        | made on the batch; the trainer's metrics are means over them      |
| `trainer/num_skipped_steps`          | batches so far with a step that was not made, since a loss or     |
|                                      | gradient was not finite; the batch is in logs/skipped_steps       |
| `routing/num_moe_layers` *           | 0, where the model has no experts: then nothing is replayed, and  |
|                                      | this is the only metric of routing                                |
| `routing/recorded_share`             | tokens with a routing record, of those that anything depends on   |
| `routing/num_without_record`         | the others: routed by the trainer's own gate                      |
| `routing/disagreement_share` *       | replayed (token, layer) decisions in which the trainer's gate     |
|                                      | would have chosen another set; `_layer_<i>`: in that layer        |
| `mismatch/with_replay_<...>` *       | `logprob_abs_mean` and `kl` on the rows of                        |
| `mismatch/without_replay_<...>` *    | `trainer.replay_probe_share`, as trained and without replay       |
| `payload/num_bytes_held`, `_reserved` | in the payload store at the end of the step                      |
| `payload/bytes_per_token`            | of the batch's payloads, prompt and response tokens alike         |
| `payload/num_read_shared`, `_remote` | payloads that the first trainer rank read here, from other hosts  |
| `payload/num_waits`                  | groups so far that had to wait for room in the payload store      |
| `generator/max_pause_s`              | longest time that a generator stood still for a swap of weights   |
| `generator/max_swap_wait_s`          | longest wait before one: draining, or still for the fetch         |
| `generator/num_crossing`, `_resumed` | sequences that went on across a swap, or were ended and resumed   |
| `generator/num_recomputed`           | that lost their KV cache to one                                   |
| `weights/num_swaps`                  | swaps of all generators during the step                           |
| `weights/max_fetch_s`                | longest fetch of a version, beside decoding                       |
| `weights/num_bytes_moved`, `_needed` | by the step's fetches, and what the engines take of them          |
| `weights/num_bad_blocks`             | that arrived with another checksum than the manifest's            |
| `weights/num_skipped_versions`       | so far: both staging buffers were being read; published later     |
| `weights/num_expired_leases`         | so far: generators that took longer than `weights.lease_timeout_s` |
| `time/read_payloads_s`               | part of `time/train_s`: reading and packing the batch's arrays    |
| `loss`, `grad_norm`                  | before the step; the norm is the one before clipping              |
| `learning_rate` *, `objective/<...>` * | what the trainer and the objective report besides               |
| `correction/weight_mean`, `_max` *   | of the product of `algorithm.corrections`, over trained tokens    |
| `correction/effective_sample_share` * | (sum w)^2 / (n * sum w^2) of these weights                       |
| `correction/<...>_share` *           | trained tokens that a correction has cut or left out              |
| `kl/<estimator>` *                   | of `algorithm.kl`: policy against the model the run starts from   |
| `metrics/num_nonfinite`              | values of this line that were nan or infinite; they are null here |
| `metrics/num_tensorboard_errors`     | lines so far that TensorBoard's files lack: they could not be     |
|                                      | written, and the run goes on without them                         |

The evaluation before the first step is a line of its own (`MetricsWriter.write_initial_evaluation`), with
`step`, `policy_version`, the metrics `eval/<...>`, `time/eval_s`, `time/elapsed_s` (0),
`metrics/num_nonfinite` and `metrics/num_tensorboard_errors`.
"""

import contextlib
import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from forgeasync.buffer.decisions import Batch
from forgeasync.observability.scored_groups import HeldOutScores, part_means
from forgeasync.rollouts.rollout import FinishReason, Group

_LOGGER = logging.getLogger(__name__)

NUM_NONFINITE = "metrics/num_nonfinite"
NUM_TENSORBOARD_ERRORS = "metrics/num_tensorboard_errors"
TRAINER_KEYS = frozenset(
    {"loss", "grad_norm", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/kl"}
)
"""What the trainer has to report for every step."""
REQUIRED_KEYS = TRAINER_KEYS | {
    "step",
    "policy_version",
    "reward/mean",
    "reward/std",
    "time/elapsed_s",
    "time/step_s",
    "time/wait_for_batch_s",
    "time/train_s",
    "time/publish_weights_s",
    "time/eval_s",
    "throughput/train_tokens_per_s",
    "throughput/generated_tokens_per_s",
    "off_policy/age_mean",
    "off_policy/age_max",
    "response/length_mean",
    "response/length_min",
    "response/length_max",
    "response/truncated_share",
}
"""Keys of every step's metrics, before the writer adds its own count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What the loop knows after one optimizer step. Times in seconds, token counts over the whole mesh.

    ``groups`` is the scored batch; ``policy_version`` the version that the step made from it; ``dropped``
    counts groups by reason; ``trainer`` holds the trainer's own metrics under their final keys.
    """

    step: int
    policy_version: int
    groups: Sequence[Group]
    elapsed_s: float
    step_s: float
    wait_for_batch_s: float
    train_s: float
    publish_weights_s: float
    num_trained_tokens: int
    num_generated_tokens: int
    dropped: Mapping[str, int]
    trainer: Mapping[str, float]
    held_out: HeldOutScores | None = None
    eval_s: float = 0.0

    def to_dict(self) -> dict[str, float | int]:
        """The line of metrics.jsonl, by key. Raises ValueError where a group has no rewards."""
        evaluation = {} if self.held_out is None else self.held_out.metrics()
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            **_reward_metrics(self.groups),
            **evaluation,
            "time/elapsed_s": self.elapsed_s,
            "time/step_s": self.step_s,
            "time/wait_for_batch_s": self.wait_for_batch_s,
            "time/train_s": self.train_s,
            "time/publish_weights_s": self.publish_weights_s,
            "time/eval_s": self.eval_s,
            "throughput/train_tokens_per_s": self.num_trained_tokens / self.step_s,
            "throughput/generated_tokens_per_s": self.num_generated_tokens / self.step_s,
            **_rollout_metrics(self.groups, trained_version=self.policy_version - 1),
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
            **self.trainer,
        }


def _rewards(group: Group) -> tuple[float, ...]:
    if group.rewards is None:
        raise ValueError(f"group {group.group_id} has not been scored")
    return group.rewards


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float | int]:
    rewards_N = np.array([reward for group in groups for reward in _rewards(group)], dtype=np.float64)
    parts = part_means([score for group in groups for score in group.scores or ()])
    return {
        "reward/mean": float(rewards_N.mean()),
        "reward/std": float(rewards_N.std()),
        **{f"reward/{name}": mean for name, mean in parts.items()},
    }


def _rollout_metrics(groups: Sequence[Group], *, trained_version: int) -> dict[str, float | int]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_sampled_tokens for rollout in rollouts]
    spans = [span for rollout in rollouts for span in rollout.version_spans]
    summed_age = sum((trained_version - span.version) * (span.end - span.start) for span in spans)
    num_truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    return {
        "off_policy/age_mean": summed_age / sum(lengths),
        "off_policy/age_max": max(trained_version - span.version for span in spans),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/truncated_share": num_truncated / len(rollouts),
    }


class _JsonLines:
    """Appends objects to a file, each as one whole line."""

    def __init__(self, path: Path) -> None:
        # Unbuffered, and one write call per line: a run that is killed leaves no half of a line behind.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(
                f"{self._file.name}: only {written} of {len(line)} bytes written; is the disk full?"
            )

    def close(self) -> None:
        self._file.close()


class _Events:
    """TensorBoard's event files. The first error, of a full disk for instance, is said; from then on they are
    left alone: all numbers are in metrics.jsonl too."""

    def __init__(self, folder: Path, first_step: int | None, say: Callable[[str], None]) -> None:
        self.num_errors = 0
        """Lines that could not be written."""
        self._say = say
        self._folder = folder
        self._writer: SummaryWriter | None = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=first_step)
        except OSError as error:
            self._give_up(error)

    def add(self, values: Mapping[str, float | int], step: int) -> None:
        """Write a line, or count it as missing."""
        if self._writer is None:
            self.num_errors += 1
            return
        try:
            for key, value in values.items():
                self._writer.add_scalar(key, value, global_step=step)
            self._writer.flush()
        except OSError as error:
            # The writer's own thread failed, maybe at an earlier value of the line.
            self.num_errors += 1
            self._give_up(error)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._say(
            f"TensorBoard's files in {self._folder} cannot be written ({type(error).__name__}: {error}); the "
            "run goes on without them, metrics.jsonl has all numbers"
        )
        writer, self._writer = self._writer, None
        if writer is not None:
            # Its thread has ended; what closing may still complain about was said.
            with contextlib.suppress(OSError):
                writer.close()


class MetricsWriter:
    """Appends to metrics.jsonl and, where ``tensorboard_dir`` is given, to TensorBoard event files."""

    def __init__(
        self,
        metrics_path: Path,
        *,
        tensorboard_dir: Path | None,
        first_step: int | None = None,
        say: Callable[[str], None] = _LOGGER.warning,
    ) -> None:
        """``first_step`` is that of a run that is resumed: TensorBoard hides what it saw from then on.

        ``say`` is told once where TensorBoard's files cannot be written; the run goes on without them.
        """
        self._lines = _JsonLines(metrics_path)
        self._events = None if tensorboard_dir is None else _Events(tensorboard_dir, first_step, say)

    def write(self, metrics: Mapping[str, float | int]) -> None:
        """Record one step. Raises KeyError naming the required keys that are missing."""
        missing = sorted(REQUIRED_KEYS - metrics.keys())
        if missing:
            raise KeyError(f"metrics of a step lack {', '.join(missing)}")
        self._append(metrics)

    def write_initial_evaluation(self, held_out: HeldOutScores, *, eval_s: float) -> None:
        """Record the held-out scores of the initial weights, before the first step, as step 0."""
        self._append(
            {
                "step": 0,
                "policy_version": 0,
                **held_out.metrics(),
                "time/eval_s": eval_s,
                "time/elapsed_s": 0.0,
            }
        )

    def _append(self, metrics: Mapping[str, float | int]) -> None:
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        counts = {NUM_NONFINITE: len(metrics) - len(finite), NUM_TENSORBOARD_ERRORS: 0}
        if self._events is not None:
            counts[NUM_TENSORBOARD_ERRORS] = self._events.num_errors
            self._events.add({**finite, **counts}, int(metrics["step"]))
            counts[NUM_TENSORBOARD_ERRORS] = self._events.num_errors
        self._lines.append({**{key: finite.get(key) for key in metrics}, **counts})

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RolloutWriter:
    """Appends a few of each step's rollouts to rollouts.jsonl, for people to read."""

    def __init__(self, rollouts_path: Path, *, per_step: int) -> None:
        self._lines = _JsonLines(rollouts_path)
        self._per_step = per_step

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Record ``per_step`` rollouts of the batch (all, if it has fewer), drawn with ``step`` as the seed.

        Raises ValueError where a group has no rewards.
        """
        scored = [(group, index) for group in groups for index in range(len(_rewards(group)))]
        picked = random.Random(step).sample(range(len(scored)), min(self._per_step, len(scored)))
        for index in sorted(picked):
            self._lines.append(_rollout_record(step, *scored[index]))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def batch_records(step: int, batch: Batch) -> list[dict[str, object]]:
    """Every rollout of a batch as in rollouts.jsonl, with its group's ``weight`` besides."""
    return [
        _rollout_record(step, group, index) | {"weight": weight}
        for group, weight in zip(batch.groups, batch.weights, strict=True)
        for index in range(len(_rewards(group)))
    ]


def _rollout_record(step: int, group: Group, index: int) -> dict[str, object]:
    rollout, reward = group.rollouts[index], _rewards(group)[index]
    record: dict[str, object] = {
        "step": step,
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "prompt": group.task.prompt,
        "response": rollout.text,
        "answer": group.task.answer,
        "reward": reward if math.isfinite(reward) else None,
        "version_spans": [[span.version, span.start, span.end] for span in rollout.version_spans],
        "prompt_tokens": rollout.num_prompt_tokens,
        "response_tokens": rollout.num_response_tokens,
        "finish_reason": rollout.finish_reason.value,
    }
    if group.scores is not None:
        score = group.scores[index]
        record |= {
            "is_correct": score.is_correct,
            "has_answer": score.has_answer,
            "parts": dict(score.parts),
            "penalties": dict(score.penalties),
            "steps": [[step.end, step.value] for step in score.steps],
        }
    return record
