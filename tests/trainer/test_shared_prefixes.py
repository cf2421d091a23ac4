"""Common beginnings that are computed once, against separate rows: losses, gradients and metrics are equal.

Sequences are those of groups: responses that begin alike, prompts whose recorded experts differ, text between
two turns, rewards of single tokens.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgeasync.algorithms import Loss
from forgeasync.config import (
    ActivationCheckpointing,
    ModelFacts,
    OptimizerSection,
    ParallelSection,
    RoutingReplay,
    TrainerSection,
)
from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    FinishReason,
    KeptTokens,
    PayloadReader,
    PayloadWriter,
    RoutedExperts,
    TeacherRecord,
    VersionSpan,
    concatenate_kept_tokens,
    decode_rollout,
)
from forgeasync.runtime import SampledRollout, store_group
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    PackedRow,
    RowForward,
    TokenPlaces,
    TrainingSequence,
    assign_rows,
    build_parallel_dims,
    items_of,
    pack_row,
    titan_config,
    training_sequence,
    whole_response,
)
from tests.support.families import write_family
from tests.support.layouts import attention_of
from tests.support.lora import LORA
from tests.support.payloads import HOST, MIB
from tests.support.processes import run_ranks
from tests.support.rollouts import make_rollout
from tests.support.trainers import make_sequences
from tests.trainer.test_loss_in_trainer import (
    PIECES,
    Step,
    assert_alike,
    step_gradients,
    unclipped_trainer,
)
from tests.trainer.test_teacher_terms import TERMS, K, narrowed

NUM_GROUPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts are clearly better or worse than each other for every token here."""
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "hf", scale=4.0, num_experts=8, top_k=3, seed=1
    )


def _joined(first: KeptTokens, num_first: int, second: KeptTokens) -> KeptTokens:
    return concatenate_kept_tokens([first.slice(0, num_first), second])


def _continued(
    prompt: TrainingSequence, response: TrainingSequence, *, num_shared: int, seed: int
) -> TrainingSequence:
    """The prompt of one and the first tokens of its response, then another one's response."""
    rng = np.random.default_rng(seed)
    num_prompt = len(prompt.prompt_ids_P)
    ids_T = np.concatenate([prompt.response_ids_T[:num_shared], response.response_ids_T])
    num = len(ids_T)
    experts_SMK = np.concatenate(
        [
            prompt.expert_ids_SMK[: num_prompt + num_shared],
            response.expert_ids_SMK[len(response.prompt_ids_P) :],
        ]
    )
    logs_TK = np.sort(rng.normal(-3.0, 1.0, (num, K)).astype(np.float32))[:, ::-1]
    return dataclasses.replace(
        response,
        prompt_ids_P=prompt.prompt_ids_P,
        response_ids_T=ids_T,
        expert_ids_SMK=experts_SMK,
        kept_tokens=_joined(prompt.kept_tokens, num_shared, response.kept_tokens),
        behavior_logprobs_T=rng.normal(-3.0, 0.3, num).astype(np.float32),
        ages_T=rng.integers(0, 4, num).astype(np.int32),
        advantage=rng.normal(size=num).astype(np.float32) if seed % 2 else float(rng.normal()),
        weight=[1.0, 2.5, 4.0][seed % 3],
        # Text between two turns is no target.
        is_sampled_T=rng.random(num) < 0.8 if seed % 4 == 1 else None,
        teacher=TeacherRecord(
            logprobs_T=rng.normal(-3.0, 1.0, num).astype(np.float32),
            ids_TK=np.stack([rng.permutation(10)[:K] for _ in range(num)]).astype(np.int32),
            topk_TK=np.ascontiguousarray(logs_TK - 2.0),
            versions_T=np.full(num, 1, np.int32),
        ),
    )


def make_trees(facts: ModelFacts) -> list[list[TrainingSequence]]:
    """Groups; in each the last prompt has another expert in its first token, so it is computed again."""
    parts = iter(make_sequences(5 * NUM_GROUPS, facts))
    groups = []
    for number in range(NUM_GROUPS):
        first = next(parts)
        # A token without a record has none to differ in.
        experts_SMK = np.where(first.expert_ids_SMK < 0, np.arange(facts.top_k), first.expert_ids_SMK)
        first = dataclasses.replace(first, expert_ids_SMK=experts_SMK.astype(np.int16))
        other_SMK = first.expert_ids_SMK.copy()
        other_SMK[0, -1] = (other_SMK[0, -1] + 1) % facts.num_experts
        other = dataclasses.replace(first, expert_ids_SMK=other_SMK)
        groups.append(
            [
                _continued(prompt, next(parts), num_shared=num_shared, seed=10 * number + index)
                for index, (prompt, num_shared) in enumerate(((first, 0), (first, 3), (first, 2), (other, 0)))
            ]
        )
    return groups


def _rows(facts: ModelFacts, *, rank: int, num_ranks: int, share: bool) -> list[PackedRow]:
    groups = make_trees(facts)[rank::num_ranks]
    halves = (groups[::2], groups[1::2])
    return [
        pack_row([one for group in half for one in group], share_prefixes=share) for half in halves if half
    ]


def _steps(
    folder: Path, parallel: ParallelSection, losses: list[str], options: dict[str, Any]
) -> dict[str, tuple[Step, Step]]:
    """Of each loss, with separate and with shared beginnings."""
    facts = read_model_facts(str(folder))
    # The attention of GPUs, with a kernel for CPUs.
    gpu = options.pop("gpu", False)
    with attention_of("cuda") if gpu else contextlib.nullcontext():
        trainer = unclipped_trainer(
            folder, PIECES["token_mean"][0], parallel=parallel, share_prefixes=True, **options
        )
    separate, shared = (
        _rows(facts, rank=trainer.data_rank, num_ranks=trainer.num_data_ranks, share=share)
        for share in (False, True)
    )
    assert sum(row.num_prefix_splits for row in shared) == NUM_GROUPS / trainer.num_data_ranks
    for one, other in zip(separate, shared, strict=True):
        assert (other.num_uses_L > 0).sum() < (one.num_uses_L > 0).sum()
        assert other.num_targets == one.num_targets and other.num_uses_L.sum() == one.num_uses_L.sum()
    found = {}
    for name in losses:
        trainer._loss, trainer._max_token_age = PIECES[name] if name in PIECES else (TERMS[name], None)
        found[name] = tuple(
            step_gradients(trainer, [_taught(row, trainer._loss.num_teacher_ids) for row in rows])
            for rows in (separate, shared)
        )
    return found


def _taught(row: PackedRow, num_ids: int) -> PackedRow:
    return dataclasses.replace(row, teacher=row.teacher and narrowed(row.teacher, num_ids))


ALL = [*PIECES, *TERMS]


@pytest.mark.parametrize(
    ("degrees", "losses", "options"),
    [
        pytest.param({}, ALL, {}, id="all losses"),
        pytest.param({}, ["token_mean"], {"lora": LORA}, id="lora"),
        pytest.param(
            {},
            ["token_mean", "together"],
            {"activation_checkpointing": ActivationCheckpointing.FULL},
            id="checkpointing",
        ),
        pytest.param({}, ["token_mean"], {"compile": True}, id="compiled", marks=pytest.mark.exhaustive),
        pytest.param({}, ["token_mean"], {"gpu": True}, id="attention of GPUs"),
        pytest.param(
            {"num_procs": 2, "tensor": 2},
            ["token_mean"],
            {"gpu": True, "compile": True, "activation_checkpointing": ActivationCheckpointing.SELECTIVE},
            id="attention of GPUs, tp2, compiled",
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
        ),
        pytest.param({"num_procs": 2, "expert": 2}, ["token_mean", "gspo"], {}, id="fsdp2-ep2"),
        pytest.param(
            {"num_procs": 2, "tensor": 2}, ["token_mean"], {}, id="tp2", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_losses_gradients_and_metrics_are_those_of_separate_rows(
    folder: Path, degrees: dict[str, int], losses: list[str], options: dict[str, Any]
) -> None:
    parallel = ParallelSection(**degrees)
    for steps in run_ranks(parallel.num_procs, _steps, folder, parallel, losses, options):
        for name, (separate, shared) in steps.items():
            assert_alike(shared, separate, name, atol=2e-6, rtol=1e-4)
            for key in ("routing/recorded_share", "routing/num_without_record", "policy/entropy"):
                assert shared[0][key] == pytest.approx(separate[0][key], rel=1e-5), key
            assert separate[0]["packing/shared_token_share"] == 0.0
            assert 0.1 < shared[0]["packing/shared_token_share"] < 0.6
            assert shared[0]["packing/num_prefix_splits"] == NUM_GROUPS


def _two_versions(folder: Path, payloads: Path, differs_at: int) -> tuple[PackedRow, Step]:
    """The row and the step of a group: two responses of version 3, and two of version 4, which trains.

    The prompt was computed under both. From its token ``differs_at`` on, version 4 chose other experts in the
    last layer.
    """
    facts = read_model_facts(str(folder))
    prompt_ids_P = np.arange(NUM_PROMPT, dtype=np.int32)
    by_version = {3: np.tile(np.arange(facts.top_k), (NUM_PROMPT, facts.num_layers, 1))}
    by_version[4] = by_version[3].copy()
    by_version[4][differs_at:, -1] += 1
    rollouts = []
    for index, version in enumerate((3, 4, 3, 4)):
        num = 5 + index
        own_RMK = np.tile(np.arange(facts.top_k), (num - 1, facts.num_layers, 1))
        own = make_rollout(index, NUM_PROMPT, num, facts=facts)
        branch = dataclasses.replace(
            own,
            prompt_ids_P=prompt_ids_P,
            # Responses begin apart.
            response_ids_T=np.full(num, index, np.int32),
            kept_tokens=None,
            version_spans=(VersionSpan(version=version, start=0, end=num),),
            routed_experts=RoutedExperts.from_rows(
                np.concatenate([by_version[version], own_RMK]),
                num_tokens=NUM_PROMPT + num,
                num_experts=facts.num_experts,
            ),
        )
        rollouts.append(SampledRollout(branches=(branch,), finish_reason=FinishReason.STOP, episode=index))
    stored = store_group(PayloadWriter(payloads, HOST, MIB), rollouts, group_id=0, generator_rank=0)
    assert isinstance(stored, tuple)
    items = [item for one in stored for item in items_of(one, whole_response(1.0), weight=1.0)]
    ((planned,),) = assign_rows(items, tokens_per_row=1024, num_ranks=1, pair_cost=0.0, share_prefixes=True)
    reader = PayloadReader(HOST)
    sequences = [
        training_sequence(
            item,
            decode_rollout(reader.read(item.branch.prompt), reader.read(item.branch.response)),
            trained_version=4,
            routing_replay=RoutingReplay.ALL,
            keep_sampling_mask=True,
            places=TokenPlaces(None),
        )
        for item in planned
    ]
    row = pack_row(sequences, share_prefixes=True)
    return row, step_gradients(unclipped_trainer(folder, Loss(), share_prefixes=True), [row])


NUM_PROMPT = 12


def test_a_prompt_of_two_versions_is_computed_once_until_their_experts_differ(
    folder: Path, tmp_path: Path
) -> None:
    row, (metrics, _) = run_ranks(1, _two_versions, folder, tmp_path, 7)[0]
    assert metrics["packing/num_prefix_splits"] == row.num_prefix_splits == 1
    num_responses = 5 + 6 + 7 + 8
    num_computed = NUM_PROMPT + (NUM_PROMPT - 7) + num_responses
    assert int((row.num_uses_L > 0).sum()) == num_computed
    share = 1.0 - num_computed / (4 * NUM_PROMPT + num_responses)
    assert metrics["packing/shared_token_share"] == pytest.approx(share)
    for target in range(row.num_targets):
        # The prompt that a target sees has the experts of the version that sampled it.
        place = row.places_T[target]
        path = [k for k in range(place + 1) if row.visible_until_L[k] > place][:NUM_PROMPT]
        expected = np.full(NUM_PROMPT, 0)
        expected[7:] = row.ages_T[target] == 0
        assert row.expert_ids_LMK[path, -1, 0].tolist() == expected.tolist()
        assert (row.expert_ids_LMK[path, 0, 0] == 0).all()


def _in_float64(folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A loss and all gradients of a model in float64, with separate and with shared beginnings."""
    facts = read_model_facts(str(folder))
    # Rotary embeddings would round to float32.
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else x.to(torch.float32)
    model = titan_config(facts).build()
    model._skip_lm_head = True
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.double()
    section = TrainerSection(tokens_per_row=1024, optimizer=OptimizerSection(learning_rate=1.0))
    parallel_dims = build_parallel_dims(section, world_size=1)
    forward = RowForward(model, parallel_dims=parallel_dims, section=section, temperature=0.8)
    found = []
    for share in (False, True):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for row in _rows(facts, rank=0, num_ranks=1, share=share):
            part = (torch.from_numpy(row.advantages_T) * forward.logprobs(row)).sum()
            part.backward()
            loss += part.detach()
        found.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
    return found[0], found[1]


def test_float64_leaves_no_difference(tmp_path: Path) -> None:
    """Of a model without experts, whose products have no float64."""
    separate, shared = run_ranks(1, _in_float64, write_family(tmp_path / "hf", "llama3_rope"))[0]
    largest = max(float(gradient.abs().max()) for gradient in separate[1:])
    for one, other in zip(separate, shared, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(other, one, atol=1e-12 * largest, rtol=1e-10)
