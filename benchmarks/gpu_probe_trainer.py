"""Parts of gpu_probe.py about training: AdamW across a resume, and the trainer with a two-layer Qwen3-MoE."""

import dataclasses
import gc
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from common import one_rank_trainer
from gpu_probe_common import GB, Device, Report, group_of_one, open_trainer_package, trainer_process

if TYPE_CHECKING:
    from forgeasync.config import ModelFacts
    from forgeasync.trainer import PackedRow, PolicyTrainer


ADAMW = {"cuda": (4096, 6, 512), "cpu": (32, 2, 8)}
"""Width, number and batch of square layers in float32."""
NUM_STEPS, NUM_BEFORE = 6, 3


def fused_adamw(device: Device, report: Report) -> None:
    """Compare steps that resume from a checkpoint with steps without one."""
    open_trainer_package(device, report)
    from forgeasync.checkpoints import checkpoint_name
    from forgeasync.config import OptimizerSection
    from forgeasync.trainer import CheckpointWriter, build_optimizer, training_state
    from forgeasync.trainer.run_checkpoint import load

    width, num_layers, batch = ADAMW[device.kind]
    # Small for such wide layers: a loss that is not finite equals none.
    section = OptimizerSection(learning_rate=1e-5, weight_decay=0.01)

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(width, width) for _ in range(num_layers)]
        model = torch.nn.Sequential(*layers).to(device.kind)
        return model, build_optimizer(list(model.named_parameters()), section)

    def step(model: torch.nn.Module, optimizer: torch.optim.AdamW, number: int) -> float:
        torch.manual_seed(1000 + number)
        x = device.randn(batch, width, dtype=torch.float32)
        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = build(0)
    with group_of_one("gloo"), tempfile.TemporaryDirectory(prefix="gpu_probe-") as scratch:
        folder = Path(scratch) / checkpoint_name(NUM_BEFORE)
        losses = [step(model, optimizer, number) for number in range(NUM_BEFORE)]
        writer = CheckpointWriter()
        writer.begin(training_state(model, optimizer), folder, run_state=b"{}", keep=1)
        writer.until_staged()
        writer.finish()
        losses += [step(model, optimizer, number) for number in range(NUM_BEFORE, NUM_STEPS)]
        other_model, other_optimizer = build(1)
        load(training_state(other_model, other_optimizer), folder)
    resumed = [step(other_model, other_optimizer, number) for number in range(NUM_BEFORE, NUM_STEPS)]
    report.put(losses=losses, losses_after_resume=resumed)
    report.check("losses_after_resume_are_equal", resumed == losses[NUM_BEFORE:])
    report.check("weights_after_resume_are_equal", _have_equal_weights(model, other_model))
    counters = [moments["step"] for moments in other_optimizer.state.values()]
    report.check("steps_are_on_the_device", all(one.device.type == device.kind for one in counters))
    report.check("steps_are_counted_on", all(float(one) == NUM_STEPS for one in counters))


def _have_equal_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(bool((one == another).all()) for one, another in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Rows, and two layers of Qwen3-30B-A3B with other values of some ``ModelFacts``."""

    changes: Mapping[str, int]
    tokens_per_row: int
    num_sequences: int
    longest: int

    def facts(self) -> "ModelFacts":
        """Return the facts of the model."""
        from forgeasync.models import SHIPPED_MODELS, read_model_facts

        facts = read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3-30B-A3B"))
        return dataclasses.replace(facts, num_layers=2, **self.changes)


SMALL = {
    "cuda": ModelSizes(
        changes={
            **{"hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 4096},
            **{"num_experts": 16, "top_k": 4, "expert_hidden_size": 256},
        },
        tokens_per_row=2048,
        num_sequences=12,
        longest=400,
    ),
    "cpu": ModelSizes(
        changes={
            **{"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 128},
            **{"num_experts": 4, "top_k": 2, "expert_hidden_size": 64},
        },
        tokens_per_row=128,
        num_sequences=4,
        longest=40,
    ),
}
LARGE = {
    "cuda": ModelSizes(changes={}, tokens_per_row=8192, num_sequences=16, longest=2048),
    "cpu": SMALL["cpu"],
}
BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in float32."""


def moe_trainer(device: Device, report: Report) -> None:
    """Check replay, activation checkpointing and resume of a small model, then time a large one."""
    cases = {"replay": _replay, "checkpointing": _checkpointing, "resume": _resume, "speed": _speed}
    # All of them need TorchTitan.
    import torchtitan  # noqa: F401

    with trainer_process():
        for name, case in cases.items():
            with report.case(name):
                case(device, report)


def _trainer(
    device: Device, sizes: ModelSizes, checkpointing: str = "none", *, resume_from: Path | None = None
) -> "PolicyTrainer":
    """Make a trainer, in bfloat16 on a GPU, always with the same random weights."""
    from forgeasync.config import OptimizerSection

    return one_rank_trainer(
        sizes.facts(),
        resume_from=resume_from,
        dtype="bfloat16" if device.is_gpu else "float32",
        tokens_per_row=sizes.tokens_per_row,
        activation_checkpointing=checkpointing,
        optimizer=OptimizerSection(learning_rate=1e-4),
    )


def _rows(sizes: ModelSizes) -> list["PackedRow"]:
    """Make random sequences with kept sets and recorded experts, which a fifth of the tokens lacks."""
    from forgeasync.rollouts import NO_RECORD, KeptTokens
    from forgeasync.trainer import TrainingSequence, pack_rows

    facts, rng = sizes.facts(), np.random.default_rng(0)
    sequences = []
    for _ in range(sizes.num_sequences):
        num_prompt = int(rng.integers(1, sizes.longest // 4))
        num_response = int(rng.integers(3, sizes.longest - num_prompt))
        ids = rng.integers(0, facts.vocab_size, num_prompt + num_response).astype(np.int32)
        scores = rng.random((len(ids), facts.num_layers, facts.num_experts))
        experts = np.sort(scores.argsort(-1)[..., : facts.top_k], axis=-1).astype(np.int16)
        experts[rng.random(len(ids)) < 0.2] = NO_RECORD
        kept = [
            sorted({int(token), *rng.integers(0, facts.vocab_size, 19).tolist()})
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
                kept_tokens=KeptTokens.from_rows(kept, vocab_size=facts.vocab_size),
            )
        )
    return pack_rows(sequences, tokens_per_row=sizes.tokens_per_row, num_ranks=1)[0]


def _replay(device: Device, report: Report) -> None:
    """Replay the model's own choice of experts, which changes no bit, and random experts, which do."""
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
    # Atomic sums of the experts' outputs make all passes differ.
    noise, changed, other = (float((one - own).abs().max()) for one in (again, replayed, elsewhere))
    report.put(
        difference_of_two_passes_nats=noise,
        difference_by_replay_of_the_own_choice_nats=changed,
        difference_by_other_experts_nats=other,
    )
    report.check("logprobs_are_finite", bool(torch.isfinite(own).all()))
    report.check("replay_of_the_own_choice_changes_nothing", changed <= 4 * noise)
    report.check("replay_of_other_experts_is_another_result", other > max(changed, 4 * noise))


def _checkpointing(device: Device, report: Report) -> None:
    """Compare loss and gradient of a step between the kinds of activation checkpointing."""
    sizes = SMALL[device.kind]
    rows = _rows(sizes)
    found = {}
    for name in ("none", "none_again", "selective", "full"):
        result = _trainer(device, sizes, name.removesuffix("_again")).train_step(rows)
        report.check(f"{name}_step_was_taken", result.skip_reason is None)
        found[name] = {key: result.metrics[key] for key in ("loss", "grad_norm")}
    report.put(steps_by_activation_checkpointing=found)
    # The order of atomic additions may differ.
    for name in ("none_again", "selective", "full"):
        pairs = ((found[name][key], value) for key, value in found["none"].items())
        largest = max(abs(one - value) / (abs(value) + 1e-3) for one, value in pairs)
        report.put(name, relative_difference=largest)
        report.check(f"{name}_is_as_none", largest < 0.01)


def _resume(device: Device, report: Report) -> None:
    """Compare steps after a checkpoint of the trainer that wrote it with those of a resumed one."""
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
    report.check("weights_are_equal", _have_equal_weights(trainer.model, resumed.model))
    norms = [[one.train_step(rows).metrics["grad_norm"] for _ in range(2)] for one in (trainer, resumed)]
    report.put(grad_norms_after_checkpoint=norms)
    difference = max(abs(one - other) / one for one, other in zip(*norms, strict=True))
    report.put(resume_relative_difference=difference)
    report.check("steps_after_resume_agree", difference < 0.02)


def _speed(device: Device, report: Report) -> None:
    """Time whole optimizer steps with full activation checkpointing, without the first."""
    gc.collect()
    sizes = LARGE[device.kind]
    facts = sizes.facts()
    while device.is_gpu and _state_bytes(facts) > device.free_bytes() / 2 and facts.num_experts > facts.top_k:
        sizes = dataclasses.replace(sizes, changes={**sizes.changes, "num_experts": facts.num_experts // 2})
        facts = sizes.facts()
    report.put(num_experts=facts.num_experts, state_gb=_state_bytes(facts) / GB)
    rows = _rows(sizes)
    trainer = _trainer(device, sizes, "full")
    num_tokens = sum(int(row.num_uses_L.sum()) for row in rows)
    results = []
    step_s = device.time_s(lambda: results.append(trainer.train_step(rows)), repeats=3)
    report.put(
        num_rows=len(rows),
        num_tokens=num_tokens,
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        peak_growth_of_a_step_gib=device.measure_peak(lambda: results.append(trainer.train_step(rows))),
    )
    report.check("all_steps_were_taken", all(result.skip_reason is None for result in results))


def _state_bytes(facts: "ModelFacts") -> int:
    from forgeasync.models import expected_shapes

    return BYTES_PER_PARAMETER * sum(map(math.prod, expected_shapes(facts).values()))
