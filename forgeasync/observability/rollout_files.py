"""Files with rollouts for people to read: rollouts.jsonl, tokens.jsonl, artifacts/ and bad_steps/.

rollouts.jsonl                           a few rollouts of each step, with their whole episodes
tokens.jsonl                             values of these rollouts' tokens (format: docs/viewer.md)
artifacts/                               files that these episodes saved
bad_steps/step-00000007/rollouts.json    reason why a step is bad, and all rollouts of its batch
bad_steps/step-00000007/rank-0.npz       packed rows of a trainer rank (``forgeasync.trainer.packing``)

Shape suffixes: N trained tokens of a branch, T its response tokens, M MoE layers.
"""

import json
import math
import random
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np

from forgeasync.buffer import Batch
from forgeasync.files import JsonLines
from forgeasync.rollouts import (
    BranchValues,
    Decision,
    EpisodeOutcome,
    Group,
    RolloutKey,
    TokenPieces,
    TokenReport,
    TokenValues,
    WorstToken,
    record_of,
)

MAX_EPISODES = 4096
"""Maximum number of episodes whose records are held. Each has at most 500,000 bytes of messages."""

NUM_DIGITS = 5
"""Significant digits of the values in tokens.jsonl."""

NUM_NONFINITE = "metrics/num_nonfinite_token_values"
"""Metric with the number of token values that are nan or infinite."""

EpisodeKey = tuple[int, int]
"""Id of a group, and index of an episode in it."""

_SIGNS = {Decision.OWN: "-", Decision.SAME: "0", Decision.OTHER: "1"}
"""Characters for decisions in tokens.jsonl."""

_BAD_STEP = re.compile(r"step-(\d{8,})")


class EpisodeRecords:
    """Records of the episodes of groups that have not trained yet, and the files that the episodes saved.

    The controller holds them here from the end of a group's last episode until the group trains or is lost.
    They are not part of the buffer's messages, because they are large and most of them are never written.
    """

    def __init__(self, artifacts: Path, *, max_episodes: int = MAX_EPISODES) -> None:
        """``artifacts`` is the folder with the files of all episodes. It need not exist."""
        self._artifacts = artifacts
        self._max_episodes = max_episodes
        self._of_group: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._num_episodes = 0
        self._num_dropped = 0
        # Files are deleted in a thread, because that would block the controller's event loop.
        self._deleting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="artifacts")

    def add(self, group_id: int, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Hold the records of a group, given all attempts at its episodes in order."""
        attempts: dict[int, list[EpisodeOutcome]] = {}
        for outcome in outcomes:
            attempts.setdefault(outcome.episode, []).append(outcome)
        kept: dict[int, Mapping[str, Any]] = {}
        for episode, of_episode in attempts.items():
            if (record := record_of(of_episode)) is None:
                continue
            if self._num_episodes >= self._max_episodes:
                self._num_dropped += 1
                continue
            kept[episode] = record
            self._num_episodes += 1
        self._of_group[group_id] = kept

    def of(self, group_id: int, episode: int) -> Mapping[str, Any] | None:
        """Return the record of an episode; None if it is not held."""
        return self._of_group.get(group_id, {}).get(episode)

    def forget(self, group_ids: Iterable[int], *, written: Collection[EpisodeKey] = ()) -> None:
        """Forget groups that have trained or are lost.

        Deletes the files of their episodes, except of those in ``written``.
        """
        ids = frozenset(group_ids)
        for group_id in ids:
            self._num_episodes -= len(self._of_group.pop(group_id, {}))
        if ids:
            self._deleting.submit(_delete, self._artifacts, ids, frozenset(written))

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        return {
            "episode/num_held_records": self._num_episodes,
            "episode/num_dropped_records": self._num_dropped,
        }

    def close(self) -> None:
        """Wait until all files to delete are deleted. A second call does nothing."""
        self._deleting.shutdown()


def _delete(artifacts: Path, group_ids: Collection[int], written: Collection[EpisodeKey]) -> None:
    if not artifacts.is_dir():
        return
    for folder in artifacts.iterdir():
        group, _, rest = folder.name.partition("-")
        episode = rest.partition("-")[0]
        if not (group.isdecimal() and episode.isdecimal()):
            continue
        key = int(group), int(episode)
        if key[0] in group_ids and key not in written:
            # Errors are ignored, because an episode that was given up may still write there.
            shutil.rmtree(folder, ignore_errors=True)


class RolloutWriter:
    """Appends a few rollouts of each step to rollouts.jsonl."""

    def __init__(self, rollouts_path: Path, *, per_step: int, episodes: EpisodeRecords | None = None) -> None:
        """``episodes`` holds the records of episodes in a run with an environment."""
        self.lines = JsonLines(rollouts_path)
        self._per_step = per_step
        self._episodes = episodes

    def picks(self, step: int, groups: Sequence[Group]) -> list[tuple[Group, int]]:
        """Return the rollouts to record: ``per_step`` of the batch, drawn with ``step`` as the seed.

        A batch with fewer rollouts is returned whole. Each rollout is given by its group and its index there.

        Raises:
            ValueError: A group has no rewards.
        """
        scored = [(group, index) for group in groups for index in range(len(rewards_of(group)))]
        picked = random.Random(step).sample(range(len(scored)), min(self._per_step, len(scored)))
        return [scored[place] for place in sorted(picked)]

    def write(self, step: int, groups: Sequence[Group]) -> list[EpisodeKey]:
        """Record the rollouts that ``picks`` returns, and return their episodes.

        Raises:
            ValueError: A group has no rewards.
        """
        written = []
        for group, index in self.picks(step, groups):
            key = group.group_id, group.rollouts[index].episode
            record = _rollout_record(step, group, index)
            if self._episodes is not None:
                record["episode_record"] = self._episodes.of(*key)
            self.lines.append(record)
            written.append(key)
        return written

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def rewards_of(group: Group) -> tuple[float, ...]:
    """Return the rewards of a scored group.

    Raises:
        ValueError: The group has not been scored.
    """
    if group.rewards is None:
        raise ValueError(f"group {group.group_id} has not been scored")
    return group.rewards


def _rollout_record(step: int, group: Group, index: int) -> dict[str, object]:
    rollout, reward = group.rollouts[index], rewards_of(group)[index]
    record: dict[str, object] = {
        "step": step,
        "group_id": group.group_id,
        "episode": rollout.episode,
        "agent": rollout.agent,
        "task_id": group.task.task_id,
        "prompt": group.task.prompt,
        "response": rollout.text,
        "answer": group.task.answer,
        "reward": reward if math.isfinite(reward) else None,
        "version_spans": [[span.version, span.start, span.end] for span in rollout.version_spans],
        "prompt_tokens": rollout.branches[0].num_prompt_tokens,
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
            "score_status": score.status.value,
            "scorer": score.scorer,
            "scorer_version": score.scorer_version,
            "feedback": score.feedback,
            "steps": [[step.end, step.value] for step in score.steps],
        }
    return record


def bad_batch_folder(parent: Path, step: int) -> Path:
    """Return the folder of a step's batch in ``parent``, the run's folder of bad steps."""
    return parent / f"step-{step:08d}"


class BadBatches:
    """Counts batches with a bad optimizer step, and writes the newest of them to disk.

    Counts begin when the command starts. The limit on folders includes those from before a resumption.
    """

    def __init__(self, parent: Path, *, num_kept: int) -> None:
        """``num_kept`` is ``trainer.bad_steps.num_kept``."""
        self._parent = parent
        self._num_kept = num_kept
        self._num_skipped = 0
        self._num_rolled_back = 0
        self._num_unkept = 0

    def add(self, step: int, batch: Batch, *, reason: str, is_rolled_back: bool, not_kept: str | None) -> str:
        """Count a batch, and write its rollouts beside the rows that the trainer's ranks have written.

        Args:
            step: Number of the bad step.
            batch: Batch of the step.
            reason: Reason why the step is bad.
            is_rolled_back: Whether the step was rolled back rather than skipped.
            not_kept: Reason why the ranks could not write their rows; None if they did.

        Returns:
            A message for people.
        """
        self._num_skipped += 1
        self._num_rolled_back += is_rolled_back
        folder = bad_batch_folder(self._parent, step)
        words = f"step {step} was {'rolled back' if is_rolled_back else 'skipped'}: {reason}"
        rollouts = [
            _rollout_record(step, group, index) | {"weight": weight}
            for group, weight in zip(batch.groups, batch.weights, strict=True)
            for index in range(len(rewards_of(group)))
        ]
        record = {"step": step, "reason": reason, "rollouts": rollouts}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "rollouts.json").write_text(json.dumps(record, indent=1))
            self._remove_old()
        except OSError as error:
            not_kept = not_kept or str(error)
        if not_kept is None:
            return f"{words}; its batch is in {folder}"
        self._num_unkept += 1
        return f"{words}; its batch could not be kept whole in {folder} ({not_kept})"

    def _remove_old(self) -> None:
        by_step = {
            int(match[1]): folder
            for folder in self._parent.iterdir()
            if (match := _BAD_STEP.fullmatch(folder.name)) is not None
        }
        for step in sorted(by_step)[: -self._num_kept]:
            shutil.rmtree(by_step[step])

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        return {
            "trainer/num_skipped_steps": self._num_skipped,
            "trainer/num_rolled_back_steps": self._num_rolled_back,
            "trainer/num_unkept_batches": self._num_unkept,
        }


class TokenLines:
    """Writes tokens.jsonl: for each step, a line for each recorded rollout, and one with the worst tokens.

    The values are those that the optimizer step used. Values that are not finite become null and are counted.
    """

    def __init__(self, path: Path, pieces: TokenPieces | None) -> None:
        """``pieces`` converts tokens to text. If it is None, the file has no texts of tokens."""
        self.lines = JsonLines(path)
        self._pieces = pieces
        self._prepared: list[dict[str, object]] = []
        self._num_nonfinite = 0

    def prepare(self, step: int, report: TokenReport) -> dict[str, float]:
        """Prepare the lines of a step for ``write``. Returns metrics by their names in metrics.jsonl."""
        self._num_nonfinite = 0
        by_rollout = groupby(report.branches, key=lambda one: one.key.rollout)
        self._prepared = [
            {"step": step, **_names(key), "branches": [self._branch(one) for one in branches]}
            for key, branches in by_rollout
        ]
        self._prepared.append({"step": step, "worst": [self._worst(token) for token in report.worst]})
        return {NUM_NONFINITE: self._num_nonfinite}

    def write(self) -> None:
        """Append the lines that were prepared last."""
        for line in self._prepared:
            self.lines.append(line)
        self._prepared = []

    def _branch(self, branch: BranchValues) -> dict[str, object]:
        pieces = None
        if self._pieces is not None:
            pieces = self._pieces.of_response(branch.prompt_ids_P, branch.response_ids_T)
        values = branch.values
        return {
            "branch": branch.key.branch,
            "num_tokens": len(branch.response_ids_T),
            "pieces": pieces,
            "positions": values.positions_N.tolist(),
            **self._columns(values),
            "version": values.versions_N.tolist(),
            "kept": values.num_kept_N.tolist(),
            "disagreement": _disagreement(values),
        }

    def _worst(self, token: WorstToken) -> dict[str, object]:
        values = token.values
        piece = None if self._pieces is None else self._pieces.of_token(int(values.token_ids_N[0]))
        return {
            **_names(token.key.rollout),
            "branch": token.key.branch,
            "position": int(values.positions_N[0]),
            "piece": piece,
            **{name: numbers[0] for name, numbers in self._columns(values).items()},
            "version": int(values.versions_N[0]),
            "kept": int(values.num_kept_N[0]),
            "disagreement": _disagreement(values),
        }

    def _columns(self, values: TokenValues) -> dict[str, list[float | None]]:
        columns = {
            "logprob": values.logprobs_N,
            "behavior": values.behavior_logprobs_N,
            "mismatch": values.mismatch_N,
            "ratio": values.ratios_N,
            "advantage": values.advantages_N,
            "entropy": values.entropies_N,
        }
        return {name: self._rounded(values_N) for name, values_N in columns.items()}

    def _rounded(self, values_N: np.ndarray) -> list[float | None]:
        rounded = [
            float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None for value in values_N.tolist()
        ]
        self._num_nonfinite += rounded.count(None)
        return rounded

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.lines.close()


def _names(key: RolloutKey) -> dict[str, object]:
    return {"group_id": key.group_id, "episode": key.episode, "agent": key.agent}


def _disagreement(values: TokenValues) -> list[str] | None:
    """Return, for each layer, a text with one character of ``_SIGNS`` per token; None without replay."""
    if values.decisions_MN is None:
        return None
    return ["".join(_SIGNS[Decision(one)] for one in layer_N) for layer_N in values.decisions_MN.tolist()]
