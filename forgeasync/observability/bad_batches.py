"""Batches with a bad optimizer step: counted, and the newest of them kept for looking at.

bad_steps/step-00000007/rollouts.json    why it is bad, and every rollout of the batch as in rollouts.jsonl
bad_steps/step-00000007/rank-0.npz       the packed rows of a trainer rank (``forgeasync.trainer.packing``)
"""

import json
import re
import shutil
from pathlib import Path

from forgeasync.buffer import Batch
from forgeasync.observability.metrics import batch_records

_NAME = re.compile(r"step-(\d{8,})")


def bad_batch_folder(parent: Path, step: int) -> Path:
    """Return the folder of a step's batch in the run's folder of bad steps."""
    return parent / f"step-{step:08d}"


class BadBatches:
    """Counts since the command started, and the folders, also those of the run before it was resumed."""

    def __init__(self, parent: Path, *, num_kept: int) -> None:
        """``num_kept`` is ``trainer.bad_steps.num_kept``."""
        self._parent = parent
        self._num_kept = num_kept
        self._num_skipped = 0
        self._num_rolled_back = 0
        self._num_unkept = 0

    def add(self, step: int, batch: Batch, *, reason: str, is_rolled_back: bool, not_kept: str | None) -> str:
        """Take note of a batch, and write its rollouts beside the rows that the trainer's ranks have written.

        ``not_kept`` says why these could not be. Returns what to tell people.
        """
        self._num_skipped += 1
        self._num_rolled_back += is_rolled_back
        folder = bad_batch_folder(self._parent, step)
        words = f"step {step} was {'rolled back' if is_rolled_back else 'skipped'}: {reason}"
        record = {"step": step, "reason": reason, "rollouts": batch_records(step, batch)}
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
            if (match := _NAME.fullmatch(folder.name)) is not None
        }
        for step in sorted(by_step)[: -self._num_kept]:
            shutil.rmtree(by_step[step])

    def metrics(self) -> dict[str, float]:
        """Return the counts, under their names in metrics.jsonl."""
        return {
            "trainer/num_skipped_steps": self._num_skipped,
            "trainer/num_rolled_back_steps": self._num_rolled_back,
            "trainer/num_unkept_batches": self._num_unkept,
        }
