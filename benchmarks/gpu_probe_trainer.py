"""Part of gpu_probe.py that trains a two-layer Qwen3-MoE in the trainer itself."""

import dataclasses
import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_probe_common import GB, Device, Report, group_of_one

if TYPE_CHECKING:
    from forgeasync.config import ActivationCheckpointing, ModelFacts
    from forgeasync.trainer import PackedRow, PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a Qwen3-MoE and its rows."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_hidden_size: int
    vocab_size: int
    tokens_per_row: int
    num_sequences: int
    longest: int


SMALL = {
    "cuda": ModelSizes(
        hidden_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_experts=16,
        top_k=4,
        expert_hidden_size=256,
        vocab_size=4096,
        tokens_per_row=2048,
        num_sequences=12,
        longest=400,
    ),
    "cpu": ModelSizes(
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=4,
        top_k=2,
        expert_hidden_size=64,
        vocab_size=128,
        tokens_per_row=128,
        num_sequences=4,
        longest=40,
    ),
}
LARGE = {
    # Layers of Qwen3-30B-A3B.
    "cuda": ModelSizes(
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        expert_hidden_size=768,
        vocab_size=151_936,
        tokens_per_row=8192,
        num_sequences=16,
        longest=2048,
    ),
    "cpu": SMALL["cpu"],
}
NUM_LAYERS = 2
BYTES_PER_PARAMETER = 16
"""Bytes of weight, gradient and two moments in float32."""


def moe_trainer(device: Device, report: Report) -> None:
    """Check replay, activation checkpointing and resuming on a small model; time a large one."""
    # These need TorchTitan: without it there is nothing to try.
    from forgeasync.models import DEVICE_TYPE

    if device.is_gpu and DEVICE_TYPE == "cuda":
        torch.cuda.set_device(0)
    _adapt_to_older_torch(report)
    backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
    os.environ.setdefault("LOCAL_RANK", "0")
    # Recomputation in the backward pass needs this thread's mesh context.
    with group_of_one(backend), torch.autograd.set_multithreading_enabled(False):
        with report.case("replay"):
            _replay(device, report)
        with report.case("activation_checkpointing"):
            _checkpointing(device, report)
        with report.case("resume"):
            _resume(device, report)
        with report.case("speed"):
            _speed(device, report)


def _adapt_to_older_torch(report: Report) -> None:
    """Remove the attention arguments of TorchTitan 0.3.0 that an older torch does not accept."""
    import inspect

    import torchtitan.models.common.attention as titan_attention

    varlen_attn = titan_attention.varlen_attn
    known = inspect.signature(varlen_attn).parameters
    if "num_splits" in known:
        return

    def without_num_splits(*arguments: object, num_splits: int | None = None, **others: object) -> object:
        return varlen_attn(*arguments, **others)

    titan_attention.varlen_attn = without_num_splits
    report.put(dropped_arguments=["num_splits"])


def _facts(sizes: ModelSizes) -> "ModelFacts":
    from forgeasync.config import ModelFacts

    return ModelFacts(
        model_type="qwen3_moe",
        num_layers=NUM_LAYERS,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        vocab_size=sizes.vocab_size,
        expert_hidden_size=sizes.expert_hidden_size,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    )


def _trainer(
    device: Device,
    sizes: ModelSizes,
    checkpointing: "ActivationCheckpointing | None" = None,
    *,
    resume_from: Path | None = None,
) -> "PolicyTrainer":
    """Return a trainer with fixed random weights, in bfloat16 on a GPU."""
    from forgeasync.algorithms import Loss
    from forgeasync.config import ActivationCheckpointing, Dtype, OptimizerSection, TrainerSection
    from forgeasync.trainer import PolicyTrainer, TrainerSetup

    section = TrainerSection(
        dtype=Dtype.BFLOAT16 if device.is_gpu else Dtype.FLOAT32,
        tokens_per_row=sizes.tokens_per_row,
        activation_checkpointing=checkpointing or ActivationCheckpointing.NONE,
        replay_probe_share=0.0,
        optimizer=OptimizerSection(learning_rate=1e-4),
    )
    setup = TrainerSetup(
        section=section,
        facts=_facts(sizes),
        temperature=1.0,
        loss=Loss(),
        seed=0,
        checkpoint=None,
        resume_from=resume_from,
    )
    return PolicyTrainer(setup)


def _rows(sizes: ModelSizes) -> list["PackedRow"]:
    """Return random sequences with kept sets and recorded experts; a fifth of the tokens have no record."""
    from forgeasync.rollouts import NO_RECORD, KeptTokens
    from forgeasync.trainer import TrainingSequence, pack_rows

    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(sizes.num_sequences):
        num_prompt = int(rng.integers(1, sizes.longest // 4))
        num_response = int(rng.integers(3, sizes.longest - num_prompt))
        ids = rng.integers(0, sizes.vocab_size, num_prompt + num_response).astype(np.int32)
        scores = rng.random((len(ids), NUM_LAYERS, sizes.num_experts))
        experts = np.sort(scores.argsort(-1)[..., : sizes.top_k], axis=-1).astype(np.int16)
        experts[rng.random(len(ids)) < 0.2] = NO_RECORD
        kept = [
            sorted({int(token), *rng.integers(0, sizes.vocab_size, 19).tolist()})
            for token in ids[num_prompt:]
        ]
        sequences.append(
            TrainingSequence(
                prompt_ids_P=ids[:num_prompt],
                response_ids_T=ids[num_prompt:],
                behavior_logprobs_T=np.full(num_response, -3.0, np.float32),
                ages_T=np.zeros(num_response, np.int32),
                advantage=float(rng.standard_normal()),
                expert_ids_SMK=experts,
                kept_tokens=KeptTokens.from_rows(kept, vocab_size=sizes.vocab_size),
            )
        )
    return pack_rows(sequences, tokens_per_row=sizes.tokens_per_row, num_ranks=1)[0]


def _replay(device: Device, report: Report) -> None:
    """Check that replaying a model's own choice of experts changes no bit, and that random experts do."""
    from forgeasync.trainer import replay_routers

    sizes = SMALL[device.kind]
    trainer, rows = _trainer(device, sizes), _rows(sizes)
    recorded = rows[0]
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, given, result: chosen.append(result[1]))
        for router in replay_routers(trainer.model)
    ]
    with torch.no_grad():
        own = trainer.logprobs(recorded, replay_routing=False)
    for hook in hooks:
        hook.remove()
    ids_LMK = torch.stack([ids[0] for ids in chosen], dim=1).cpu().numpy().astype(np.int16)
    with torch.no_grad():
        again = trainer.logprobs(recorded, replay_routing=False)
        replayed = trainer.logprobs(dataclasses.replace(recorded, expert_ids_LMK=ids_LMK))
        elsewhere = trainer.logprobs(recorded)
    # Where experts' outputs are added up atomically, no two passes are equal.
    noise, changed, other = (float((one - own).abs().max()) for one in (again, replayed, elsewhere))
    report.put(
        num_targets=len(own),
        difference_of_two_passes_nats=noise,
        difference_by_replay_of_the_own_choice_nats=changed,
        difference_by_other_experts_nats=other,
    )
    report.check("logprobs_are_finite", bool(torch.isfinite(own).all()))
    report.check("replay_of_the_own_choice_changes_nothing", changed <= 4 * noise)
    report.check("replay_of_other_experts_is_another_result", other > max(changed, 4 * noise))


def _checkpointing(device: Device, report: Report) -> None:
    """Check that loss and gradient of a step do not depend on activation checkpointing."""
    from forgeasync.config import ActivationCheckpointing

    sizes = SMALL[device.kind]
    rows = _rows(sizes)
    found = {}
    for name, choice in (
        ("none", ActivationCheckpointing.NONE),
        ("none_again", ActivationCheckpointing.NONE),
        ("selective", ActivationCheckpointing.SELECTIVE),
        ("full", ActivationCheckpointing.FULL),
    ):
        result = _trainer(device, sizes, choice).train_step(rows)
        report.check(f"{name}_step_was_taken", result.skip_reason is None)
        found[name] = {key: result.metrics[key] for key in ("loss", "grad_norm")}
    report.put(steps_by_activation_checkpointing=found)
    # Sums by atomic additions may come in another order.
    for name in ("none_again", "selective", "full"):
        differences = [abs(found[name][key] - value) for key, value in found["none"].items()]
        scales = [abs(value) for value in found["none"].values()]
        largest = max(one / (scale + 1e-3) for one, scale in zip(differences, scales, strict=True))
        report.put(**{f"{name}_relative_difference": largest})
        report.check(f"{name}_is_as_none", largest < 0.01)


def _resume(device: Device, report: Report) -> None:
    """Compare the step after a checkpoint of the trainer that wrote it and of one that resumed."""
    from forgeasync.checkpoints import checkpoint_name

    sizes = SMALL[device.kind]
    rows, trainer = _rows(sizes), _trainer(device, sizes)
    with tempfile.TemporaryDirectory(prefix="gpu_probe-") as scratch:
        folder = Path(scratch) / checkpoint_name(2)
        for _ in range(2):
            trainer.train_step(rows)
        trainer.begin_checkpoint(folder, run_state=b"{}", keep=1)
        trainer.finish_checkpoint()
        resumed = _trainer(device, sizes, resume_from=folder)
    report.check("version_goes_on", resumed.policy_version == trainer.policy_version == 2)
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    report.check("weights_are_equal", all(bool((one == other).all()) for one, other in pairs))
    steps = {}
    for name, one in (("uninterrupted", trainer), ("resumed", resumed)):
        results = [one.train_step(rows) for _ in range(2)]
        steps[name] = [result.metrics["grad_norm"] for result in results]
    report.put(grad_norms_after_checkpoint=steps)
    norms = zip(steps["uninterrupted"], steps["resumed"], strict=True)
    difference = max(abs(one - other) / one for one, other in norms)
    report.put(resume_relative_difference=difference)
    report.check("steps_after_resume_agree", difference < 0.02)


def _speed(device: Device, report: Report) -> None:
    """Time optimizer steps with full activation checkpointing, without the first one."""
    from forgeasync.config import ActivationCheckpointing

    gc.collect()
    sizes = LARGE[device.kind]
    while device.is_gpu and _state_bytes(sizes) > device.free_bytes() / 2 and sizes.num_experts > sizes.top_k:
        sizes = dataclasses.replace(sizes, num_experts=sizes.num_experts // 2)
    report.put(num_experts=sizes.num_experts, state_gb=_state_bytes(sizes) / GB)
    rows = _rows(sizes)
    trainer = _trainer(device, sizes, ActivationCheckpointing.FULL)
    num_tokens = sum(int((row.sequence_ids_L >= 0).sum()) for row in rows)
    results = []
    step_s = device.time_s(lambda: results.append(trainer.train_step(rows)), repeats=3)
    report.put(
        num_rows=len(rows),
        num_tokens=num_tokens,
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        peak_growth_of_a_step_gib=device.measure_peak(lambda: results.append(trainer.train_step(rows))),
        recorded_share=results[0].metrics["routing/recorded_share"],
        losses=[result.metrics["loss"] for result in results],
    )
    report.check("all_steps_were_taken", all(result.skip_reason is None for result in results))


def _state_bytes(sizes: ModelSizes) -> int:
    attention = 2 * sizes.hidden_size * sizes.head_dim * (sizes.num_heads + sizes.num_kv_heads)
    experts = 3 * sizes.hidden_size * sizes.expert_hidden_size * sizes.num_experts
    ends = 2 * sizes.hidden_size * sizes.vocab_size
    return BYTES_PER_PARAMETER * (NUM_LAYERS * (attention + experts) + ends)
