"""The composed loss against float64 references, and in the trainer: pieces, reference policy, age limit."""

import dataclasses
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from forgeasync.algorithms.aggregation import (
    Aggregation,
    ConstantLength,
    SequenceMeanOfTokenMean,
    SequenceMeanOfTokenSum,
    TokenMean,
)
from forgeasync.algorithms.corrections import AgeWeight, product
from forgeasync.algorithms.kl import KlPlace, penalty_to_go
from forgeasync.algorithms.loss import Loss
from forgeasync.algorithms.objectives import Objective, Supervised
from forgeasync.algorithms.row_tokens import RowTokens
from forgeasync.config.model import LoraSection
from forgeasync.config.trainer import OptimizerSection, ParallelSection, TrainerSection
from forgeasync.models.config_file import read_model_facts
from forgeasync.trainer.packing import PackedRow, TrainingSequence, pack_row, pack_rows
from forgeasync.trainer.policy_trainer import PolicyTrainer
from forgeasync.trainer.setup import TrainerSetup
from forgeasync.trainer.step_sums import StepSums
from tests.support.lora import LORA, adapters, reference_logprobs
from tests.support.models import write_random_model
from tests.support.processes import run_ranks
from tests.trainer.test_trainer import make_sequences

K3 = {"estimator": "k3", "coefficient": 0.3, "where": "loss"}


def section(**keys: object) -> Loss:
    return Loss.model_validate(keys)


class Tokens:
    """Two rows of random sequences, some tokens masked out (and nan there), in plain numbers."""

    def __init__(self, seed: int, *, is_weighted: bool = False) -> None:
        """Sequences count once each, or else differently often."""
        rng = np.random.default_rng(seed)
        self.rows: list[dict[str, np.ndarray]] = []
        for lengths in ([3, 5, 1], [4, 2]):
            ids = np.repeat(np.arange(len(lengths)), lengths)
            num = len(ids)
            mask = rng.random(num) < 0.8
            mask[ids == 1] = True
            logprobs = rng.uniform(-3, -0.1, num)
            row = {
                "logprobs": logprobs,
                "behavior": logprobs - rng.normal(0, 0.4, num),
                "ref": logprobs - rng.normal(0, 0.4, num),
                "advantages": rng.normal(0, 1, len(lengths))[ids],
                "ages": rng.integers(0, 5, num),
                "mask": mask,
                "ids": ids,
                "weights": np.asarray([1.0, 2.5, 7.0])[ids] if is_weighted else np.ones(num),
            }
            row["behavior"][~mask] = np.nan
            self.rows.append(row)

    def tensors(self, row: int, dtype: torch.dtype = torch.float32) -> RowTokens:
        values = self.rows[row]

        def tensor(name: str) -> torch.Tensor:
            return torch.from_numpy(values[name]).to(dtype)

        return RowTokens(
            logprobs_T=tensor("logprobs").requires_grad_(),
            behavior_logprobs_T=tensor("behavior"),
            advantages_T=tensor("advantages"),
            mask_T=torch.from_numpy(values["mask"]),
            sequence_ids_T=torch.from_numpy(values["ids"]),
            ages_T=torch.from_numpy(values["ages"]),
            sample_weights_T=tensor("weights"),
            ref_logprobs_T=tensor("ref"),
        )


def hand_made(x: Sequence[np.ndarray], tokens: Tokens, case: str) -> float:
    """The loss of both rows; ``x`` is where gradients flow through."""
    means: list[float] = []
    weights: list[float] = []
    for row, x_row in zip(tokens.rows, x, strict=True):
        for sequence in np.unique(row["ids"]):
            losses = []
            trained = [t for t in range(len(x_row)) if row["ids"][t] == sequence and row["mask"][t]]
            for t in trained:
                ratio = math.exp(row["logprobs"][t] - row["behavior"][t])
                if case == "loss":
                    log = row["ref"][t] - x_row[t]
                    weight = min(ratio, 1.1) * 0.5 ** (row["ages"][t] / 2.0)
                    losses.append(-row["advantages"][t] * x_row[t] * weight + 0.3 * (math.exp(log) - 1 - log))
                else:
                    to_go = sum(row["logprobs"][u] - row["ref"][u] for u in trained if u >= t)
                    weight = ratio if 0.7 <= ratio <= 1.4 else 0.0
                    losses.append(-(row["advantages"][t] - 0.3 * to_go) * x_row[t] * weight)
            if losses:
                means.append(sum(losses) / len(losses))
                weights.append(row["weights"][trained[0]])
    assert len(set(weights)) > 1
    return float(np.average(means, weights=weights))


COMPOSED = {
    "loss": section(
        objective={"kind": "reinforce"},
        corrections=[{"kind": "truncated_is", "cap": 1.1}, {"kind": "age_weight", "half_life": 2.0}],
        aggregation={"kind": "sequence_mean_of_token_mean"},
        kl=K3,
    ),
    "reward": section(
        objective={"kind": "reinforce"},
        corrections=[{"kind": "icepop", "low": 0.7, "high": 1.4}],
        aggregation={"kind": "sequence_mean_of_token_mean"},
        kl={"estimator": "k1", "coefficient": 0.3, "where": "reward"},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", COMPOSED)
def test_a_composed_loss_and_its_gradient(case: str, seed: int) -> None:
    tokens = Tokens(seed, is_weighted=True)
    loss = COMPOSED[case]
    rows = [tokens.tensors(index) for index in range(2)]
    total = sum(loss.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T) for row in rows)
    results = [loss(row, total=total) for row in rows]
    x = [row["logprobs"] for row in tokens.rows]
    found = sum(float(result.loss.detach()) for result in results)
    assert found == pytest.approx(hand_made(x, tokens, case), rel=1e-5, abs=1e-6)
    step = 1e-6
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        result.loss.backward()
        assert row.logprobs_T.grad is not None and torch.isfinite(row.logprobs_T.grad).all()
        for t in range(len(x[index])):
            up, down = [values.copy() for values in x], [values.copy() for values in x]
            up[index][t] += step
            down[index][t] -= step
            slope = (hand_made(up, tokens, case) - hand_made(down, tokens, case)) / (2 * step)
            assert float(row.logprobs_T.grad[t]) == pytest.approx(slope, rel=1e-3, abs=1e-4), (index, t)
    assert results[0].weights_T is not None and not results[0].weights_T.requires_grad
    name = "kl/k3" if case == "loss" else "kl/k1"
    assert set(results[0].sums) >= {name, f"correction/{'truncated' if case == 'loss' else 'masked'}_share"}


def own_objective(scale: float) -> Callable[[RowTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """As a user might write one: the log-probability itself, scaled."""
    return lambda row: (scale * row.logprobs_T, {})


class OwnObjective(Objective):
    """The same as a class."""

    scale: float = Field(gt=0.0)

    @property
    def needs_proximal(self) -> bool:
        return self.scale > 2.0

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.scale * row.logprobs_T, {}


def own_estimator(row: RowTokens) -> torch.Tensor:
    return row.masked(row.logprobs_T - row.ref_logprobs_T).abs()


class OwnAggregation(TokenMean):
    """Twice the mean."""

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return 2.0 * super().summed(values_T, mask_T, sequence_ids_T)


@pytest.mark.parametrize("factory", ["own_objective", "OwnObjective"])
def test_an_objective_of_ones_own(factory: str) -> None:
    row = Tokens(0).tensors(0)
    keys = {"kind": "python", "factory": f"tests.algorithms.test_loss.{factory}", "options": {"scale": 3.0}}
    loss = section(objective=keys)
    expected = torch.where(row.mask_T, 3.0 * row.logprobs_T, 0.0).sum() / 4.0
    torch.testing.assert_close(loss(row, total=4.0).loss, expected)
    assert loss.needs_proximal == (factory == "OwnObjective")
    assert pickle.loads(pickle.dumps(loss)) == loss, "it travels to the trainer's procs"


def test_an_estimator_and_an_aggregation_of_ones_own() -> None:
    row = Tokens(0).tensors(0)
    estimator = {"kind": "python", "factory": "tests.algorithms.test_loss.own_estimator"}
    loss = section(
        objective={"kind": "reinforce"},
        kl={"estimator": estimator, "coefficient": 0.5},
        aggregation={"kind": "python", "factory": "tests.algorithms.test_loss.OwnAggregation"},
    )
    kl_T = (row.logprobs_T - row.ref_logprobs_T).abs()
    losses_T = -row.advantages_T * row.logprobs_T + 0.5 * kl_T
    found = loss(row, total=4.0)
    torch.testing.assert_close(found.loss, 2.0 * torch.where(row.mask_T, losses_T, 0.0).sum() / 4.0)
    torch.testing.assert_close(found.sums["kl/python"], kl_T[row.mask_T].detach().sum())
    ones_T = row.sample_weights_T
    assert loss.count(row.mask_T, row.sequence_ids_T, ones_T) == row.mask_T.sum()


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
        {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.1},
        {"kind": "kimi15", "tau": 0.7},
    ],
)
def test_a_loss_calls_its_objective_on_the_row(keys: dict[str, object]) -> None:
    for seed in range(3):
        row = Tokens(seed).tensors(0)
        loss = section(objective=keys)
        found = loss(row, total=4.0)
        losses_T, sums = loss.objective(row)
        torch.testing.assert_close(found.loss, torch.where(row.mask_T, losses_T, 0.0).sum() / 4.0)
        assert found.weights_T is None and found.sums.keys() == sums.keys()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased_k3"])
@pytest.mark.parametrize("where", list(KlPlace))
def test_a_penalty_is_the_estimate_of_its_name(estimator: str, where: KlPlace) -> None:
    row = Tokens(2).tensors(0)
    penalty = {"estimator": estimator, "coefficient": 0.5, "where": where.value}
    loss = section(objective={"kind": "reinforce"}, kl=penalty)
    assert loss.needs_reference and not section().needs_reference
    mask_T, ids_T = row.mask_T, row.sequence_ids_T
    current_T, ref_T = row.logprobs_T.detach()[mask_T], row.ref_logprobs_T[mask_T]
    match estimator:
        case "k1":
            kl_T = current_T - ref_T
        case "k2":
            kl_T = (current_T - ref_T) ** 2 / 2
        case "k3" | "unbiased_k3":
            kl_T = (ref_T - current_T).exp() - 1 - (ref_T - current_T)
    if estimator == "unbiased_k3":
        kl_T = kl_T * (current_T - row.behavior_logprobs_T[mask_T]).exp()
    advantages_T = row.advantages_T[mask_T]
    if where is KlPlace.REWARD:
        later_TT = (ids_T[mask_T][:, None] == ids_T[mask_T]) & torch.ones(len(kl_T), len(kl_T)).triu().bool()
        advantages_T = advantages_T - 0.5 * (later_TT * kl_T).sum(1)
    losses_T = -advantages_T * current_T + (0.5 * kl_T if where is KlPlace.LOSS else 0.0)
    result = loss(row, total=4.0)
    torch.testing.assert_close(result.loss.detach(), losses_T.sum() / 4.0)
    torch.testing.assert_close(result.sums[f"kl/{estimator}"], kl_T.sum())


def test_supervised_is_the_negative_log_likelihood_of_all_tokens() -> None:
    row = Tokens(0).tensors(0)
    loss = Loss(objective=Supervised())
    assert not loss.needs_reference
    total = loss.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T)
    assert float(total) == int(row.mask_T.sum())
    torch.testing.assert_close(loss(row, total=total).loss, -row.logprobs_T[row.mask_T].mean())


def test_decoupled_ppo_around_the_current_policy() -> None:
    """Its gradient is that of -A * logprob, weighted by current / behavior, 0 above the cap."""
    row = Tokens(0).tensors(0)
    loss = section(objective={"kind": "decoupled_ppo", "clip": 0.2, "behavior_cap": 1.2})
    loss(row, total=1.0).loss.backward()
    ratio_T = (row.logprobs_T.detach() - row.behavior_logprobs_T).exp()
    weights_T = torch.where(row.mask_T & (ratio_T <= 1.2), ratio_T, 0.0)
    assert row.logprobs_T.grad is not None
    torch.testing.assert_close(row.logprobs_T.grad, -row.advantages_T * weights_T)


def test_weights_by_age() -> None:
    row = Tokens(0).tensors(0)
    aged = dataclasses.replace(row, ages_T=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]))
    weights_T, _ = product([AgeWeight(half_life=2.0)], aged)
    expected = [1.0, 0.5**0.5, 0.5, 0.5**1.5, 0.25, 1.0, 0.5**0.5, 0.5, 0.5**1.5]
    kept = row.mask_T.tolist()
    np.testing.assert_allclose(
        weights_T.tolist(), [w if k else 0.0 for w, k in zip(expected, kept, strict=True)], rtol=1e-6
    )


def test_penalty_to_go() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, torch.nan, 16.0, 32.0], requires_grad=True)
    mask = torch.tensor([True, True, True, False, True, True])
    to_go = penalty_to_go(values, mask, torch.tensor([0, 0, 1, 1, 1, 2]))
    assert to_go.tolist() == [3.0, 2.0, 20.0, 16.0, 16.0, 32.0] and not to_go.requires_grad
    empty = torch.zeros(0)
    assert penalty_to_go(empty, empty.bool(), empty.long()).shape == (0,)


# In the trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0, num_experts=8, top_k=3)


def make_trainer(
    folder: Path,
    loss: Loss,
    *,
    parallel: ParallelSection | None = None,
    learning_rate: float = 1e-12,
    lora: LoraSection | None = None,
    max_token_age: int | None = None,
) -> PolicyTrainer:
    """Unless a learning rate is given, steps leave the weights as they are; gradients are not clipped."""
    setup = TrainerSetup(
        section=TrainerSection(
            parallel=parallel or ParallelSection(),
            tokens_per_row=1024,
            optimizer=OptimizerSection(learning_rate=learning_rate, max_grad_norm=1e9),
        ),
        facts=read_model_facts(str(folder)),
        temperature=0.8,
        loss=loss,
        seed=0,
        checkpoint=folder,
        lora=lora,
        max_token_age=max_token_age,
    )
    return PolicyTrainer(setup)


def _near_policy(folder: Path) -> list[TrainingSequence]:
    """Sequences of uneven lengths and ages, sampled by a policy not far from the trained one."""
    trainer = make_trainer(folder, Loss())
    rng = np.random.default_rng(1)
    near = []
    for sequence in make_sequences(11, read_model_facts(str(folder))):
        with torch.no_grad():
            logprobs_T = trainer.logprobs(pack_row([sequence])).numpy()
        noise_T = rng.normal(0, 0.3) / 10 + 0.2 * rng.standard_normal(len(logprobs_T))
        near.append(
            dataclasses.replace(
                sequence,
                behavior_logprobs_T=(logprobs_T + noise_T).astype(np.float32),
                ages_T=rng.integers(0, 4, len(logprobs_T)).astype(np.int32),
                weight=[1.0, 2.5, 4.0][len(near) % 3],
            )
        )
    return near


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step_gradients(
    trainer: PolicyTrainer, rows: list[PackedRow]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update(
            {n: whole(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
        )

    hook = trainer._optimizer.register_step_pre_hook(keep)
    metrics = trainer.train_step(rows).metrics
    hook.remove()
    return metrics, gradients


Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics and gradients."""

PIECES: dict[str, tuple[Loss, int | None]] = {
    "token_mean": (section(kl=K3), None),
    "token_mean, young tokens": (section(), 1),
    "token_sum": (section(aggregation={"kind": "sequence_mean_of_token_sum"}), None),
    "constant_length": (
        section(aggregation={"kind": "constant_length", "length": 60}, objective={"kind": "topr"}),
        2,
    ),
    "gspo": (
        section(
            objective={"kind": "gspo", "clip_low": 0.03, "clip_high": 0.03},
            aggregation={"kind": "sequence_mean_of_token_mean"},
        ),
        None,
    ),
    "corrected": (
        section(
            objective={"kind": "reinforce"},
            corrections=[
                {"kind": "truncated_is", "cap": 1.1, "level": "sequence"},
                {"kind": "off_policy_sequence_mask", "threshold": 0.02},
                {"kind": "age_weight", "half_life": 2.0},
            ],
            aggregation={"kind": "sequence_mean_of_token_mean"},
            kl={"estimator": "k2", "coefficient": 0.3, "where": "reward"},
        ),
        2,
    ),
}


def _pieces(
    folder: Path, parallel: ParallelSection, sequences: list[TrainingSequence], tokens_per_row: int
) -> dict[str, Step]:
    # Built with a reference; the weights stay as they are from one case to the next.
    trainer = make_trainer(folder, PIECES["token_mean"][0], parallel=parallel)
    rows = pack_rows(sequences, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)
    found = {}
    for name, (loss, max_token_age) in PIECES.items():
        trainer._loss, trainer._max_token_age = loss, max_token_age
        found[name] = step_gradients(trainer, rows[trainer.data_rank])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InOneRow:
    """What one process finds that has all sequences in one row."""

    sequences: list[TrainingSequence]
    pieces: dict[str, Step]
    step: Step
    by_hand: Step


def _in_one_row(folder: Path) -> InOneRow:
    sequences = _near_policy(folder)
    assert sum(sequence.num_tokens for sequence in sequences) < 1024
    step, by_hand = _by_hand(folder, sequences)
    pieces = _pieces(folder, ParallelSection(), sequences, 1024)
    return InOneRow(sequences=sequences, pieces=pieces, step=step, by_hand=by_hand)


@pytest.fixture(scope="module")
def in_one_row(folder: Path) -> InOneRow:
    return run_ranks(1, _in_one_row, folder)[0]


@pytest.mark.parametrize(
    ("parallel", "tokens_per_row"),
    [
        pytest.param(ParallelSection(num_procs=2, expert=2), 128, id="fsdp2-ep2"),
        pytest.param(ParallelSection(num_procs=2, context=2), 256, id="cp2"),
    ],
)
def test_pieces_add_up_to_one_big_batch(
    folder: Path, in_one_row: InOneRow, parallel: ParallelSection, tokens_per_row: int
) -> None:
    """Uneven microbatches and ranks: every aggregation's loss, gradients and metrics are the whole's."""
    arguments = (folder, parallel, in_one_row.sequences, tokens_per_row)
    for found in run_ranks(parallel.num_procs, _pieces, *arguments):
        for name, (metrics, gradients) in found.items():
            expected, expected_gradients = in_one_row.pieces[name]
            assert metrics.keys() == expected.keys()
            for key in ("loss", "grad_norm", "off_policy/effective_sample_share", "mismatch/kl"):
                assert metrics[key] == pytest.approx(expected[key], rel=2e-5, abs=1e-6), (name, key)
            for key in expected:
                if key.startswith(("correction/", "objective/", "kl/", "off_policy/", "policy/")):
                    assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), (name, key)
            assert gradients.keys() == expected_gradients.keys()
            largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
            assert largest > 1e-3
            for parameter, gradient in expected_gradients.items():
                torch.testing.assert_close(
                    gradients[parameter], gradient, atol=2e-6 * largest, rtol=1e-4, msg=f"{name} {parameter}"
                )


def test_old_tokens_are_left_out(in_one_row: InOneRow) -> None:
    ages = np.concatenate([sequence.ages_T for sequence in in_one_row.sequences])
    metrics, _ = in_one_row.pieces["token_mean, young tokens"]
    assert metrics["off_policy/rejected_token_share"] == pytest.approx(float((ages > 1).mean()))
    assert "off_policy/rejected_token_share" not in in_one_row.pieces["gspo"][0]


def _by_hand(folder: Path, sequences: list[TrainingSequence]) -> tuple[Step, Step]:
    """Young tokens of plain REINFORCE, by the trainer and by a loss written out over its logprobs."""
    trainer = make_trainer(folder, section(objective={"kind": "reinforce"}), max_token_age=1)
    row = pack_row(sequences)
    step = step_gradients(trainer, [row])
    mask = torch.from_numpy(row.ages_L[row.mask_L] <= 1)
    advantages = torch.from_numpy(row.advantages_L[row.mask_L])
    behavior = torch.from_numpy(row.behavior_logprobs_L[row.mask_L])
    lengths = [len(sequence.response_ids_T) for sequence in sequences]
    weights = torch.tensor([one.weight for one in sequences]).repeat_interleave(torch.tensor(lengths))
    with trainer._forward.replay(row):
        logprobs, entropies = trainer._forward.predictions(row)
        loss = -(weights * advantages * logprobs)[mask].sum() / weights[mask].sum()
        loss.backward()
    own = {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    ratios = (logprobs.detach() - behavior)[mask].double().exp()
    share = float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum()))
    metrics = {
        "loss": float(loss),
        "off_policy/effective_sample_share": share,
        "policy/entropy": float(entropies[mask].double().mean()),
    }
    return step, (metrics, own)


def test_a_step_is_the_written_out_loss(in_one_row: InOneRow) -> None:
    metrics, gradients = in_one_row.step
    expected, expected_gradients = in_one_row.by_hand
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5)
    assert 0.5 < metrics["off_policy/effective_sample_share"] < 0.999
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def _against_checkpoint(
    folder: Path, sequences: list[TrainingSequence]
) -> list[tuple[dict[str, float], dict[str, float], float, float]]:
    return [_one_against_checkpoint(folder, sequences, lora) for lora in (None, LORA)]


def _one_against_checkpoint(
    folder: Path, sequences: list[TrainingSequence], lora: LoraSection | None
) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Metrics of a first and a third step, and what they should say of KL and loss."""
    penalty = {"estimator": "k3", "coefficient": 0.3, "where": "loss"}
    loss = section(objective={"kind": "reinforce"}, kl=penalty)
    # With recorded experts: the reference does not take them.
    trainer = make_trainer(folder, loss, learning_rate=3e-3, lora=lora)
    free = [dataclasses.replace(sequence, kept_tokens=None, weight=1.0) for sequence in sequences[:3]]
    unrecorded = pack_row([dataclasses.replace(sequence, expert_ids_SMK=None) for sequence in free])
    first = trainer.train_step([unrecorded]).metrics
    trainer.train_step([unrecorded])
    if lora is not None:
        assert all(float(tensor.abs().max()) > 0 for tensor in adapters(trainer).values())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = reference.lm_head
    head.register_forward_hook(lambda module, inputs, logits: logits / 0.8)
    row = pack_row(free)
    with torch.no_grad():
        ref_T = torch.cat([reference_logprobs(reference, sequence) for sequence in free]).double()
        current_T = trainer.logprobs(row).double()
    third = trainer.train_step([row]).metrics
    log_T = ref_T - current_T
    expected_kl = float((log_T.exp() - 1 - log_T).mean())
    advantages_T = torch.from_numpy(row.advantages_L[row.mask_L]).double()
    expected_loss = float((-advantages_T * current_T).mean()) + 0.3 * expected_kl
    return first, third, expected_kl, expected_loss


def test_the_reference_is_the_checkpoint(folder: Path, in_one_row: InOneRow) -> None:
    """Frozen copy and switched-off adapters against transformers: no KL at first, then that to the start."""
    for first, third, expected_kl, expected_loss in run_ranks(
        1, _against_checkpoint, folder, in_one_row.sequences
    )[0]:
        assert first["kl/k3"] == 0.0
        assert expected_kl > 1e-3
        assert third["kl/k3"] == pytest.approx(expected_kl, rel=1e-3)
        assert third["loss"] == pytest.approx(expected_loss, rel=1e-4)


def _sums_of_this_rank() -> dict[str, float]:
    sums = StepSums(num_layers=0, device="cpu")
    first, second = {"objective/first": torch.tensor(2.0)}, {"objective/second": torch.tensor(3.0)}
    sums.add(first if dist.get_rank() == 0 else second | first)
    sums.add({"mismatch/num_fresh": torch.tensor(0), "mismatch/fresh_logprob_abs_mean": torch.tensor(0.0)})
    return sums.metrics(4, mesh=init_device_mesh("cpu", (2,)))


def test_a_sum_that_only_some_ranks_have_is_not_taken_for_another() -> None:
    """An objective of a user's own may give one for some rows only, and in any order."""
    for metrics in run_ranks(2, _sums_of_this_rank):
        assert metrics["objective/first"] == 1.0 and metrics["objective/second"] == 0.75


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (TokenMean(), (1.0 + 2.0 + 3 * 5.0) / (1 + 1 + 3)),
        (SequenceMeanOfTokenMean(), (1.5 + 3 * 5.0) / (1 + 3)),
        (SequenceMeanOfTokenSum(), (3.0 + 3 * 5.0) / (1 + 3)),
        (ConstantLength(length=4), (3.0 + 3 * 5.0) / 4 / (1 + 3)),
    ],
)
def test_a_weighted_mean_by_hand(aggregate: Aggregation, expected: float) -> None:
    """Two tokens of a sequence that counts once, one of a sequence that counts three times."""
    values_T = torch.tensor([1.0, 2.0, 5.0, math.nan], requires_grad=True)
    loss = aggregate(
        values_T=values_T,
        mask_T=torch.tensor([True, True, True, False]),
        sequence_ids_T=torch.tensor([0, 0, 1, 1]),
        weights_T=torch.tensor([1.0, 1.0, 3.0, 3.0]),
    )
    loss.backward()
    assert float(loss) == pytest.approx(expected), "what is masked out may be nan"
    assert values_T.grad is not None and values_T.grad.isfinite().all() and values_T.grad[3] == 0


SEEN: dict[str, torch.Tensor] = {}


def seeing_objective(row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    SEEN["objective"] = row.advantages_T
    return -row.advantages_T * row.logprobs_T, {}


def seeing_correction(row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    SEEN["correction"] = row.advantages_T
    return torch.ones_like(row.advantages_T), {}


def test_corrections_see_the_advantage_of_the_sequence_itself() -> None:
    """A penalty in the reward changes the objective's advantages from token to token, not theirs."""
    loss = section(
        objective={"kind": "python", "factory": "tests.algorithms.test_loss.seeing_objective"},
        corrections=[{"kind": "python", "factory": "tests.algorithms.test_loss.seeing_correction"}],
        kl={"coefficient": 0.5, "estimator": "k1", "where": "reward"},
    )
    tokens = RowTokens(
        logprobs_T=torch.tensor([-1.0, -2.0], requires_grad=True),
        behavior_logprobs_T=torch.tensor([-1.0, -2.0]),
        advantages_T=torch.tensor([3.0, 3.0]),
        mask_T=torch.tensor([True, True]),
        sequence_ids_T=torch.tensor([0, 0]),
        ages_T=torch.tensor([0, 0]),
        sample_weights_T=torch.ones(2),
        ref_logprobs_T=torch.tensor([-3.0, -3.0]),
    )
    loss(tokens, total=2.0)
    assert SEEN["correction"].tolist() == [3.0, 3.0]
    assert SEEN["objective"].tolist() == [3.0 - 0.5 * (2.0 + 1.0), 3.0 - 0.5 * 1.0]
