"""Logs the tokens that an engine has in flight, from vLLM's outputs of each step.

For each request, the outputs of a step have the sampled tokens with their log-probabilities and kept sets,
the newly known rows of routed experts, and the version of the weights. In vLLM 0.32 this is
``update_from_output`` of ``v1/core/sched/scheduler.py``, the same with every model runner. The engine's
thread logs them before they leave it. Turns begin and end on the event loop, so a lock guards the log.

Only turns of opened groups are logged. If the log cannot be written, it is abandoned with all groups in it,
and the failure is counted. Groups that are opened later start a new log.
"""

import itertools
import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinishReason

from forgeasync.rollouts import (
    FINISHES,
    NO_ROWS,
    BegunTurn,
    CaptureSpec,
    EndedTurn,
    FinishReason,
    ForgottenTurns,
    InFlightLog,
    InFlightRecord,
    KeptTokens,
    LoggedTurn,
    TokenBatch,
)

TURN_ARGUMENT = "forgeasync_turn"
"""Sampling argument with the key of a request's turn; absent if the turn is not logged."""

PART_ARGUMENT = "forgeasync_part"
"""Sampling argument with the index of a request among those of its response or episode."""

_FINISHES: dict[EngineFinishReason | None, int] = {
    EngineFinishReason.STOP: FINISHES.index(FinishReason.STOP),
    EngineFinishReason.LENGTH: FINISHES.index(FinishReason.LENGTH),
}

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _OpenTurn:
    """A logged turn that has not ended."""

    group_id: int
    num_known_rows: int
    """Number of tokens of the turn's path whose routing is in the log or need not be."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request in the engine (engine thread only)."""

    turn: int
    part: int
    num_rows: int = 0
    """Number of rows of routed experts that vLLM has returned for the request, in the order of its tokens."""


class InFlightRecorder:
    """Writer of one engine's log of tokens in flight."""

    def __init__(self, folder: Path | None, *, records: CaptureSpec, vocab_size: int) -> None:
        """Log into ``folder``, which is created for each log; None: log nothing."""
        self._folder = folder
        self._records = records
        self._vocab_size = vocab_size
        self._log: InFlightLog | None = None
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._turns: dict[int, _OpenTurn] = {}
        self._turns_of_group: dict[int, list[int]] = {}
        """Keys of all turns of the logged groups, including ended turns."""
        self._requests: dict[str, _Request] = {}
        self.num_failures = 0
        """Number of logs that were abandoned."""

    def open_group(self, group_id: int) -> None:
        """Start to log the turns of a group; turns of an earlier group with this id are forgotten."""
        if self._folder is None:
            return
        self.forget_group(group_id)
        with self._lock:
            if self._log is None:
                try:
                    self._log = InFlightLog(self._folder)
                except OSError as error:
                    self._give_up(error)
                    return
            self._turns_of_group[group_id] = []

    def forget_group(self, group_id: int) -> None:
        """Forget a group that no other engine will continue; it need not be logged."""
        with self._lock:
            self._forget(self._turns_of_group.pop(group_id, []))

    def forget_turns(self, keys: list[int]) -> None:
        """Forget turns that no other engine will continue; their group stays open."""
        with self._lock:
            self._forget(keys)

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            self._turns.pop(key, None)
        if keys:
            self._append(ForgottenTurns(keys=tuple(keys)))

    def begin_turn(self, begun: BegunTurn, continued: LoggedTurn | None = None) -> int | None:
        """Log the beginning of a turn, with the tokens that another engine has sampled of it.

        Returns the turn's key in this log; None if its group is not logged. The keys in ``begun`` and
        ``continued`` are ignored.
        """
        with self._lock:
            turns = self._turns_of_group.get(begun.episode.group_id)
            if turns is None:
                return None
            key = next(self._keys)
            turns.append(key)
            turn = _OpenTurn(group_id=begun.episode.group_id, num_known_rows=begun.first_row)
            self._turns[key] = turn
            records: list[InFlightRecord] = [replace(begun, key=key)]
            if continued is not None and continued.batch is not None:
                batch = continued.batch
                records.append(replace(batch, keys_N=np.full(batch.num_tokens, key, np.int64)))
                turn.num_known_rows += int(batch.num_rows_N.sum())
            self._append(*records)
            return key

    def end_turn(self, ended: EndedTurn) -> None:
        """Log the end of a turn. Tokens that are sampled later are ignored."""
        with self._lock:
            if self._turns.pop(ended.key, None) is not None:
                self._append(ended)

    def request_added(self, request: EngineCoreRequest) -> None:
        """Register a new request (engine thread)."""
        assert request.sampling_params is not None
        arguments = request.sampling_params.extra_args or {}
        if TURN_ARGUMENT in arguments:
            self._requests[request.request_id] = _Request(
                turn=arguments[TURN_ARGUMENT], part=arguments[PART_ARGUMENT]
            )

    def request_ended(self, request_id: str) -> None:
        """Remove an aborted request; it need not be logged (engine thread)."""
        self._requests.pop(request_id, None)

    def stepped(self, outputs: EngineCoreOutputs) -> None:
        """Log the tokens that a step has sampled (engine thread)."""
        if not self._requests:
            return
        with self._lock:
            found = []
            for output in outputs.outputs:
                request = self._requests.get(output.request_id)
                if request is None:
                    continue
                if output.new_token_ids and (turn := self._turns.get(request.turn)) is not None:
                    found.append((output, request, self._new_rows(output, request, turn)))
                if output.finish_reason is not None:
                    del self._requests[output.request_id]
            if found:
                assert outputs.weight_version is not None
                self._append(self._batch(found, version=int(outputs.weight_version)))

    def _new_rows(self, output: EngineCoreOutput, request: _Request, turn: _OpenTurn) -> np.ndarray | None:
        """Return the rows of tokens whose routing was unknown; later requests of a turn repeat them."""
        rows = output.routed_experts
        if rows is None or not self._records.routing:
            return None
        start = request.num_rows
        request.num_rows += len(rows)
        assert start <= turn.num_known_rows, "vLLM gives out a request's rows without a gap"
        # vLLM fills layers without experts with zeros.
        new = rows[turn.num_known_rows - start :, self._records.num_dense_layers :]
        turn.num_known_rows += len(new)
        return new

    def _batch(
        self, found: list[tuple[EngineCoreOutput, _Request, np.ndarray | None]], *, version: int
    ) -> TokenBatch:
        nums = [len(output.new_token_ids) for output, _, _ in found]
        num_tokens = sum(nums)
        last = np.cumsum(nums) - 1
        first = np.append(0, last[:-1] + 1)
        finishes = np.zeros(num_tokens, np.uint8)
        finishes[last] = [_FINISHES.get(output.finish_reason, 0) for output, _, _ in found]
        num_rows = np.zeros(num_tokens, np.int32)
        num_rows[first] = [0 if rows is None else len(rows) for _, _, rows in found]
        rows_RMK = None
        if self._records.routing:
            some = [rows for _, _, rows in found if rows is not None]
            rows_RMK = np.concatenate(some) if some else NO_ROWS
        kept = self._kept([output for output, _, _ in found]) if self._records.kept_tokens else None
        return TokenBatch(
            keys_N=np.repeat(np.asarray([request.turn for _, request, _ in found], np.int64), nums),
            ids_N=np.asarray([one for output, _, _ in found for one in output.new_token_ids], np.int32),
            # The first column belongs to the sampled token.
            logprobs_N=np.concatenate([_logprobs(output) for output, _, _ in found])[:, 0],
            versions_N=np.full(num_tokens, version, np.int32),
            parts_N=np.repeat(np.asarray([request.part for _, request, _ in found], np.int32), nums),
            finishes_N=finishes,
            num_rows_N=num_rows,
            rows_RMK=rows_RMK,
            num_kept_N=None if kept is None else np.diff(kept.offsets).astype(np.int32),
            kept_ids_J=None if kept is None else kept.ids_N,
        )

    def _kept(self, outputs: list[EngineCoreOutput]) -> KeptTokens:
        masks = [mask for output in outputs if (mask := output.new_sampling_mask) is not None]
        assert len(masks) == len(outputs), "every request asks for its kept sets"
        widths = [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
        return KeptTokens.from_widths(
            np.concatenate(widths).astype(np.int64),
            np.concatenate([mask.token_ids for mask in masks]).astype(np.int32),
            vocab_size=self._vocab_size,
        )

    def _append(self, *records: InFlightRecord) -> None:
        if self._log is None:
            return
        try:
            self._log.append(*records)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Abandon the log with all open groups: a log with gaps could not be continued from."""
        self.num_failures += 1
        logger.warning(
            "tokens in flight cannot be logged: %s; if this generator dies, its %d groups start over",
            error,
            len(self._turns_of_group),
        )
        self._turns.clear()
        self._turns_of_group.clear()
        if self._log is not None:
            self._log.close()
            self._log = None


def _logprobs(output: EngineCoreOutput) -> np.ndarray:
    assert output.new_logprobs is not None, "every request asks for its log-probabilities"
    return output.new_logprobs.logprobs
