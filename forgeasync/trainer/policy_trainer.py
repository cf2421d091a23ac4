"""One rank of the trainer: model, optimizer and the optimizer step over packed rows.

Every rank of the mesh calls the same methods in the same order; ranks wait for each other only in the
collectives of these methods. The module does not use Monarch: actors and tests create ``PolicyTrainer`` after
initializing torch.distributed.

Shape suffixes: L packed row length, T its targets (the response tokens trained on).
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms import RowTokens, means_of_taught
from forgeasync.config import OnBadStep, RouterBias
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import OperatorTrace
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.forward import (
    ReferenceLogprobs,
    RowForward,
    TargetCounts,
    base_model,
    count_targets,
    frozen_copy,
    recorded_tokens,
    row_tokens,
    student_ids_of,
)
from forgeasync.trainer.hf_checkpoint import named_weights
from forgeasync.trainer.model import build_parallel_dims, build_parallel_model
from forgeasync.trainer.optimizer import WeightAverage, build_optimizer, set_learning_rate
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.replay_router import RouterBiasUpdate
from forgeasync.trainer.run_checkpoint import CheckpointWriter, Snapshots, TrainerState, snapshot_bytes
from forgeasync.trainer.setup import TrainerSetup
from forgeasync.trainer.step import (
    MinibatchResult,
    MismatchTooLarge,
    NonFiniteWeights,
    RowValues,
    StepJudge,
    StepResult,
    agree_on_problem,
    describe_difference,
    describe_fresh_mismatch,
    describe_rows,
    merge_step_results,
    require_finite,
    value_ranges,
)
from forgeasync.trainer.step_sums import Probe, StepSums
from forgeasync.trainer.token_collector import ReplayedDecisions, TokenCollector
from forgeasync.weights import NamedWeight

logger = logging.getLogger(__name__)


class PolicyTrainer:
    """Trains a policy on packed rows, and writes its weights and checkpoints."""

    def __init__(self, setup: TrainerSetup, *, checkpoints: CheckpointWriter | None = None) -> None:
        """Build the model on this rank; collective.

        Raises:
            ValueError: The loss cannot be built, or ``resume_from`` is a checkpoint of another model.
        """
        section, facts, lora = setup.section, setup.facts, setup.lora
        self._section = section
        self._lora = lora
        self._facts = facts
        loss = self._loss = setup.loss
        self._max_token_age = setup.max_token_age
        self._is_bitwise = setup.is_bitwise
        self._bad_steps = setup.bad_steps
        dims = self._parallel_dims = build_parallel_dims(section, world_size=dist.get_world_size())
        self.model = build_parallel_model(facts, section, parallel_dims=dims, lora=lora, seed=setup.seed)
        if setup.checkpoint is not None:
            hf_checkpoint.load(self.model, facts, setup.checkpoint)
        temperature = setup.temperature
        generator_forward = None
        if setup.is_bitwise:
            # It imports vLLM, which no other trainer needs.
            from forgeasync.trainer.generator_forward import GeneratorForward

            generator_forward = GeneratorForward(self.model, facts)
        self._forward = RowForward(
            self.model,
            parallel_dims=dims,
            section=section,
            temperature=temperature,
            generator_forward=generator_forward,
        )
        self._decisions = ReplayedDecisions(dims, num_layers=len(self._forward.routers))
        self._reference: ReferenceLogprobs | None = None
        if loss.needs_reference and lora is not None:
            self._reference = base_model(self.model, self._forward)
        elif loss.needs_reference:
            assert setup.checkpoint is not None, "a penalty is on moving away from a checkpoint"
            self._reference = frozen_copy(
                facts, section, parallel_dims=dims, temperature=temperature, checkpoint=setup.checkpoint
            )
        self._router_bias: RouterBiasUpdate | None = None
        if section.router_bias is RouterBias.UPDATED:
            self._router_bias = RouterBiasUpdate(self.model, section.router_bias_speed)
        self._optimizer = build_optimizer(self._trained(), section.optimizer)
        self._probe = Probe(section.replay_probe_share)
        self._judge = StepJudge(section.bad_steps)
        self._average = WeightAverage(self.model, facts, setup.average_alpha, has_adapters=lora is not None)
        self.state = TrainerState(
            self.model, self._optimizer, self._average, probe=self._probe, spikes=self._judge.spikes
        )
        self._checkpoints = checkpoints or CheckpointWriter()
        self._snapshots: Snapshots | None = None
        self._readers: list[Callable[[], None]] = []
        # Context-parallel ranks compute the same losses and metrics, so they count once.
        batch_mesh = self._loss_mesh = dims.get_optional_mesh("batch")
        self.data_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
        self.num_data_ranks = 1 if batch_mesh is None else batch_mesh.size()
        if setup.resume_from is not None:
            self.resume(setup.resume_from)

    @property
    def policy_version(self) -> int:
        """Number of batches trained on so far."""
        return self.state.policy_version

    def logprobs(self, row: PackedRow, *, replay_routing: bool = True) -> torch.Tensor:
        """Return log-probabilities of a row's targets with the current weights, float32 [T], with gradients.

        Computed over the row's kept sets, with its recorded experts unless ``replay_routing`` is False.
        """
        row = row if replay_routing else dataclasses.replace(row, expert_ids_LMK=None)
        with self._forward.replay(row):
            return self._forward.logprobs(row)

    def train_step(self, rows: Sequence[PackedRow], *, max_fresh_mismatch: float | None = None) -> StepResult:
        """Train on a batch of one optimizer step: ``train_batch`` with one minibatch."""
        return self.train_batch([rows], max_fresh_mismatch=max_fresh_mismatch)

    def train_batch(
        self, minibatches: Sequence[Sequence[PackedRow]], *, max_fresh_mismatch: float | None = None
    ) -> StepResult:
        """Make one optimizer step on each minibatch, over this rank's rows (the same number on every rank).

        The loss of a step is that of all ranks' rows together: neither packing nor the number of ranks
        changes the gradient. If a loss or a gradient of any rank is not finite, every rank leaves weights and
        optimizer unchanged, and the result gives the reason. ``trainer.bad_steps`` decides whether the next
        minibatch follows or the whole batch is rolled back. The version counts batches: it grows by one,
        regardless of the number of steps. The learning rate follows from the version.

        Raises:
            NonFiniteWeights: The weights after a step are not finite, and there is no earlier snapshot.
            ValueError: A step must be rolled back, and there is no snapshot.
            MismatchTooLarge: On tokens sampled under the current weights, log-probabilities differ from the
                generator's by more than ``max_fresh_mismatch`` nats on average, or in a bit of one of them
                with ``is_bitwise``. No step was made.
        """
        start_s = time.perf_counter()
        self._waited_s = 0.0
        learning_rate = set_learning_rate(self._optimizer, self._section.optimizer, self.policy_version + 1)
        proximal = self._proximal_logprobs(minibatches)
        results: list[MinibatchResult] = []
        num_rows = 0
        for index, (rows, proximal_logprobs) in enumerate(zip(minibatches, proximal, strict=True)):
            limit = max_fresh_mismatch if index == 0 else None
            result = self._step(rows, proximal_logprobs, first_row=num_rows, max_fresh_mismatch=limit)
            result.metrics["learning_rate"] = learning_rate
            results.append(result)
            num_rows += len(rows)
            if result.bad is not None and result.bad.remedy is not OnBadStep.SKIP:
                break
        is_rolled_back = self._roll_back_if_needed(results)
        self.state.policy_version += 1
        of_batch = merge_step_results(
            results,
            num_steps=len(minibatches),
            is_rolled_back=is_rolled_back,
            policy_version=self.policy_version,
            train_s=time.perf_counter() - start_s,
        )
        of_batch.metrics["time/wait_for_copies_s"] = self._waited_s
        if self._snapshots is not None:
            self._snapshots.begin_if_due(self.policy_version, self.state.tensors())
        return of_batch

    def _roll_back_if_needed(self, results: list[MinibatchResult]) -> bool:
        """Roll back a batch if its last result requires it, or if its weights are not finite; collective.

        Weights, moments and random states become those of the batch's start. Returns whether the batch was
        rolled back. A problem of the weights is added to the result of the last step made. No thread may read
        the weights meanwhile.
        """
        made = [index for index, result in enumerate(results) if result.bad is None]
        bad = self._judge.judge_weights(value_ranges(self._weights_by_name())) if made else None
        step = self.policy_version + 1
        if bad is not None:
            results[made[-1]] = dataclasses.replace(results[made[-1]], bad=bad)
        elif results[-1].bad is None or results[-1].bad.remedy is not OnBadStep.ROLLBACK:
            return False
        if self._snapshots is None or self._snapshots.newest != self.policy_version:
            if bad is not None:
                raise NonFiniteWeights(
                    f"step {step} is refused, and there is no snapshot before it: {bad.reason}"
                )
            assert results[-1].bad is not None
            raise ValueError(
                f"trainer.bad_steps: step {step} must be rolled back, but this trainer takes no snapshots; "
                f"must be skip or stop here. It is bad because {results[-1].bad.reason}"
            )
        tensors = self.state.tensors()
        self._snapshots.roll_back(tensors)
        self.state.take_over(tensors)
        return True

    def _proximal_logprobs(
        self, minibatches: Sequence[Sequence[PackedRow]]
    ) -> list[Sequence[torch.Tensor | None]]:
        """Return log-probabilities [T] at the batch's start by row; None if the current ones are the same."""
        proximal: list[Sequence[torch.Tensor | None]] = [[None] * len(rows) for rows in minibatches]
        if self._loss.needs_proximal:
            with torch.no_grad():
                proximal[1:] = [[self.logprobs(row) for row in rows] for rows in minibatches[1:]]
        return proximal

    def _step(
        self,
        rows: Sequence[PackedRow],
        proximal: Sequence[torch.Tensor | None],
        *,
        first_row: int,
        max_fresh_mismatch: float | None,
    ) -> MinibatchResult:
        """Make one optimizer step, unless it is bad; ``first_row`` rows of the batch precede it."""
        sums = StepSums(
            num_layers=len(self._forward.routers),
            device=DEVICE_TYPE,
            is_first=first_row == 0,
            has_states=self._facts.linear is not None,
        )
        collector = TokenCollector(self._loss.objective, self._decisions, trained_version=self.policy_version)
        recorded = [recorded_tokens(row, self._max_token_age) for row in rows]
        counts = count_targets(self._loss, rows, recorded, mesh=self._loss_mesh)
        values = [
            self._accumulate_gradients(
                first_row + index, row, tokens, proximal[index], counts, sums, collector
            )
            for index, (row, tokens) in enumerate(zip(rows, recorded, strict=True))
        ]
        if self._is_bitwise and first_row == 0:
            self._require_equal_bits(rows, values)
        # Before clipping, because a norm of nan makes every gradient nan.
        gradients = value_ranges(
            (f"the reduced gradient of {name}", parameter.grad) for name, parameter in self._trained()
        )
        grad_norm = float(
            dist_utils.clip_grad_norm_(
                [parameter for _, parameter in self._trained()],
                self._section.optimizer.max_grad_norm,
                ep_enabled=self._parallel_dims.ep_enabled,
            )
        )
        metrics = means_of_taught(sums.metrics(counts.num_trained, mesh=self._loss_mesh))
        metrics["grad_norm"] = grad_norm
        if self._max_token_age is not None:
            metrics["off_policy/rejected_token_share"] = 1.0 - counts.num_trained / max(1, counts.num_targets)
        # Before a collective, so that no rank begins its next snapshot while another rank has only older
        # ones.
        if self._snapshots is not None:
            self._waited_s += self._snapshots.until_written()
        bad = self._judge.judge(describe_rows(values), gradients, grad_norm)
        metrics |= self._judge.metrics()
        if bad is None and max_fresh_mismatch is not None:
            problem = describe_fresh_mismatch(metrics, max_fresh_mismatch, step=self.policy_version + 1)
            if problem is not None:
                self._optimizer.zero_grad()
                raise MismatchTooLarge(problem)
        self._until_read()
        if bad is None:
            self._optimizer.step()
            self._judge.made(grad_norm)
            self._average.step()
        if self._router_bias is not None and bad is None:
            self._router_bias.step()
        elif self._router_bias is not None:
            self._router_bias.discard()
        self._optimizer.zero_grad()
        return MinibatchResult(
            num_targets=counts.num_trained,
            num_padding_tokens=sums.num_padding_tokens,
            num_computed_tokens=sums.num_computed_tokens,
            metrics=metrics,
            bad=bad,
            tokens=collector.report(),
        )

    def _require_equal_bits(self, rows: Sequence[PackedRow], values: Sequence[RowValues]) -> None:
        own_row, target, text = rows[0], None, None
        for row, (index, _, inputs, _) in zip(rows, values, strict=True):
            logprobs_T = inputs["the log-probability"]
            assert logprobs_T is not None
            if (found := describe_difference(row, logprobs_T, index=index)) is not None:
                own_row, (target, text) = row, found
                break
        problem = agree_on_problem(text)
        if problem is not None:
            self._optimizer.zero_grad()
            self._write_trace(own_row, target if text == problem else None)
            raise MismatchTooLarge(f"step {self.policy_version + 1}: {problem}")

    def _write_trace(self, row: PackedRow, target: int | None) -> None:
        """Write the vectors of a target of one rank's row to the folder of bad steps; collective.

        The other ranks compute any row.
        """
        if self._bad_steps is None:
            return
        try:
            if target is None:
                with torch.no_grad():
                    self.logprobs(row)
                return
            vectors = self._forward.trace(row, target)
            place = row.places_T[target]
            is_seen_L = row.visible_until_L[: place + 1] > place
            OperatorTrace(
                version=self.policy_version,
                token_ids_S=row.token_ids_L[: place + 1][is_seen_L],
                logprob=float(row.behavior_logprobs_T[target]),
                vectors=vectors,
            ).write(self._bad_steps)
        except Exception:
            # The difference itself matters more.
            logger.warning("there is no trace of the operators", exc_info=True)
        finally:
            # The first error of any rank ends the run, and the file is read then.
            dist.barrier()

    def _accumulate_gradients(
        self,
        index: int,
        row: PackedRow,
        recorded: RowTokens,
        proximal_logprobs_T: torch.Tensor | None,
        counts: TargetCounts,
        sums: StepSums,
        collector: TokenCollector,
    ) -> RowValues:
        """Add a row's gradients; return its loss, and what the loss is computed from."""
        ref_logprobs_T = None if self._reference is None else self._reference(row)
        # The backward pass recomputes checkpointed layers, which have to use the same experts.
        noted_ML = self._decisions.note(row)
        with self._forward.replay(row, noted_ML):
            predictions = self._forward.predictions(row, extra_ids_TK=student_ids_of(row, self._loss))
            tokens = row_tokens(
                row,
                recorded,
                predictions,
                self._loss,
                ref_logprobs_T=ref_logprobs_T,
                proximal_logprobs_T=proximal_logprobs_T,
            )
            result = self._loss.with_terms(tokens, total=counts.total, term_totals=counts.term_totals)
            if row.expert_ids_LMK is not None:
                sums.add_routing([router.replay_counts for router in self._forward.routers])
            if self._router_bias is not None:
                self._router_bias.add(self._forward.routers)
            result.loss.backward()
        logprobs_T, behavior_T = tokens.logprobs_T.detach(), tokens.behavior_logprobs_T
        assert predictions.entropies_T is not None
        sums.add_row(row, tokens, result, predictions.entropies_T)
        collector.add(row, tokens, result, predictions.entropies_T, noted_ML)
        if self._probe.is_due():
            with torch.no_grad():
                unreplayed_T = self.logprobs(row, replay_routing=False)
            sums.add_probe("with_replay", logprobs_T - behavior_T)
            sums.add_probe("without_replay", unreplayed_T - behavior_T)
        return (
            index,
            result.loss.detach(),
            {
                "the log-probability": logprobs_T,
                "the generator's log-probability": behavior_T,
                "the reference's log-probability": ref_logprobs_T,
                "the advantage": tokens.advantages_T,
                "the sample weight": tokens.sample_weights_T,
                "the correction": result.weights_T,
            },
            tokens.mask_T,
        )

    def named_weights(self) -> list[NamedWeight]:
        """Return this rank's shards of the policy's weights, by Hugging Face (peft) names.

        A tied head is left out.
        """
        return named_weights(self.model, self._facts, has_adapters=self._lora is not None)

    def published_weights(self) -> list[NamedWeight]:
        """Return this rank's shards of all published weights: the policy's and the average's."""
        return [*self.named_weights(), *self._average.named_weights()]

    def require_finite_weights(self, what: str) -> None:
        """Raise ``NonFiniteWeights``, naming ``what``, if weights are not finite; collective."""
        require_finite(self._weights_by_name(), what=what)

    def _weights_by_name(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((weight.names[0], weight.tensor) for weight in self.named_weights())

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def let_read(self, until_read: Callable[[], None]) -> None:
        """Let another thread read the current weights during the next forward and backward passes.

        Before the weights change, the training thread calls ``until_read``, which returns once they may
        change.
        """
        self._readers.append(until_read)

    def _until_read(self) -> None:
        """Wait until the weights may change: all threads that read them must have finished."""
        start_s = time.perf_counter()
        self._checkpoints.until_staged()
        for until_read in self._readers:
            until_read()
        self._readers.clear()
        self._waited_s += time.perf_counter() - start_s

    def snapshot_bytes(self) -> int:
        """Return the bytes of shared memory for this rank's snapshots."""
        return snapshot_bytes(self.state.tensors())

    def open_snapshots(self, folder: Path, *, every_steps: int, at_most: int) -> int:
        """Take snapshots in ``folder``, and continue from the newest one not after ``at_most``; collective.

        Returns its version. If the ranks have no common snapshot, returns the version of the loaded weights.

        Raises:
            ValueError: The host does not have enough shared memory.
        """
        state = self.state.tensors()
        self._snapshots = Snapshots(folder, state, every_steps=every_steps)
        if self._snapshots.restore(state, at_most=at_most) is not None:
            self.state.take_over(state)
        else:
            # So that the first batch can also be rolled back.
            self._snapshots.begin_if_due(self.policy_version, state)
        return self.policy_version

    def finish_snapshot(self) -> int | None:
        """Wait for the last snapshot, in any thread; return the version of the newest complete one."""
        assert self._snapshots is not None, "opened"
        self._snapshots.until_written()
        return self._snapshots.newest

    def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Start to write a checkpoint while training continues; collective.

        The newest ``keep`` checkpoints are kept. Waits for the previous checkpoint. ``finish_checkpoint``
        raises errors of writing.

        Raises:
            NonFiniteWeights: Weights or moments have nan or inf. Nothing is written or removed.
        """
        state = self.state.tensors()
        require_finite(state.items(), what=f"checkpoint {folder.name}")
        self._checkpoints.begin(state, folder, run_state=run_state, keep=keep)

    def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            CheckpointNotWritten: It could not be written; nothing of it is left.
        """
        self._checkpoints.finish()

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, which may be of another parallel layout; collective.

        Raises:
            ValueError: It is a checkpoint of another model or of other adapters.
        """
        self.state.load(folder)

    def save_hf(self, folder: Path, *, source: Path) -> None:
        """Write a Hugging Face folder, or with adapters a peft folder; collective.

        Config and tokenizer are copied from ``source``, the folder of the model (the adapters' base model).

        Raises:
            NonFiniteWeights: Weights have nan or inf. Nothing is written.
        """
        self.require_finite_weights(f"export {folder.name}")
        if self._lora is None:
            hf_checkpoint.save(self.model, self._facts, folder, source=source)
        else:
            hf_checkpoint.save_adapters(self.model, self._facts, self._lora, folder, source=source)
