"""Mismatch of trainer and generator, with replay of nothing, of routing, of kept sets, and of both.

    python benchmarks/mismatch.py [--model FOLDER] [--groups N] [--out FILE.json]

A vLLM engine samples groups (temperature 0.8, top-k 20, top-p 0.9), and the trainer computes the
log-probabilities of the same tokens, in four settings:

- same weights: the rest is rounding
- bf16 generator: the generator's weights are rounded to bfloat16 and the trainer's are not, as a stand-in for
  differences between real kernels
- noisy choice: Gaussian noise for each token on the probabilities by which the trainer's routers choose, like
  rounding in the gate; the experts' weights in the sum do not change
- noisy gate: Gaussian noise on the trainer's router weights changes choices and weights in the sum; replay
  corrects the choices

Reports mean and maximum of abs(trainer logprob - generator logprob), the k3 estimate of KL(generator ||
trainer), the share of routing decisions that the trainer would have made otherwise, and the cosine of the
policy gradient with that of a trainer that has the generator's weights, experts and kept sets.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import REPOSITORY, RESULTS, machine_facts, one_rank_trainer, print_table, watched_step, write_json
from gpu_probe_common import group_of_one
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout, all_kept, check_rollout
from forgeasync.trainer import PackedRow, PolicyTrainer, TrainingSequence, pack_rows

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=96)
GROUP_SIZE = 4
MAX_CONTEXT = 160
TOKENS_PER_ROW = 32768
GATE_NOISE = 0.08
"""Standard deviation of the noise on router weights, in units of their own."""
CHOICE_NOISE = 0.003
"""Standard deviation of the noise on router probabilities."""
REPLAYS = {
    "nothing": (False, False),
    "routing": (True, False),
    "kept sets": (False, True),
    "both": (True, True),
}
"""(routing, kept sets) by name."""


def write_changed(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Copy a model folder with each tensor changed, given its name."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        save_file({name: change(name, t) for name, t in load_file(file).items()}, file, {"format": "pt"})
    return target


def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16."""
    return tensor.bfloat16().to(tensor.dtype)


def noisy_gate(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Add noise to router weights."""
    if not name.endswith("mlp.gate.weight"):
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return tensor + noise * tensor.std() * GATE_NOISE


def sample(folder: Path, num_groups: int) -> list[Rollout]:
    """Sample rollouts with an engine, with their routing and kept sets."""
    return asyncio.run(_sample(folder, num_groups))


async def _sample(folder: Path, num_groups: int) -> list[Rollout]:
    from forgeasync.generator import GeneratorEngine

    records = CaptureSpec(routing=True, kept_tokens=True)
    engine = await GeneratorEngine.start(
        model_path=folder,
        generator=GeneratorSection(max_num_seqs=64, kv_cache_gib=0.25),
        max_context_length=MAX_CONTEXT,
        seed=0,
        records=records,
        weights=WeightsSection(),
    )
    facts = read_model_facts(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer(f"State the final answer to the following arithmetic problem: {a} + {b} =")["input_ids"]
        for a, b in np.random.default_rng(0).integers(0, 9, (num_groups, 2)).tolist()
    ]
    groups = await asyncio.gather(
        *(
            engine.generate(
                prompt_ids_P=np.asarray(prompt, np.int32), num_samples=GROUP_SIZE, sampling=SAMPLING, seed=i
            )
            for i, prompt in enumerate(prompts)
        )
    )
    engine.shutdown()
    rollouts = [rollout for group in groups for rollout in group]
    for rollout in rollouts:
        check_rollout(rollout, records, facts)
    return rollouts


def make_trainer(folder: Path) -> PolicyTrainer:
    """Make a trainer of one rank with the weights of a folder."""
    facts, temperature = read_model_facts(str(folder)), SAMPLING.temperature
    return one_rank_trainer(facts, temperature=temperature, checkpoint=folder, tokens_per_row=TOKENS_PER_ROW)


def make_rows(rollouts: Sequence[Rollout]) -> list[PackedRow]:
    """Pack rollouts with alternating advantages."""
    sequences = [
        TrainingSequence(
            prompt_ids_P=rollout.prompt_ids_P,
            response_ids_T=rollout.response_ids_T,
            behavior_logprobs_T=rollout.logprobs_T,
            ages_T=np.zeros(rollout.num_response_tokens, np.int32),
            advantage=1.0 if index % 2 else -1.0,
            expert_ids_SMK=rollout.routed_experts.to_dense(),
            kept_tokens=rollout.kept_tokens,
        )
        for index, rollout in enumerate(rollouts)
    ]
    return pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=1)[0]


def step(trainer: PolicyTrainer, rows: list[PackedRow]) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metrics of a step, and its gradient as one vector."""
    result, gradients, _ = watched_step(trainer, rows)
    return result.metrics, torch.cat([one.flatten() for one in gradients]).double()


def disturb_choices(trainer: PolicyTrainer, num_tokens: int) -> None:
    """Add noise to the choice of experts, in place of TorchTitan's load-balancing bias."""
    for index, layer in enumerate(trainer.model.layers.values()):
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(1, num_tokens, layer.moe.router.num_experts, generator=generator)
        layer.moe.expert_bias_E = noise * CHOICE_NOISE


def compare(
    setting: str, rollouts: Sequence[Rollout], trained: Path, sampled: Path, *, disturbed: bool = False
) -> list[dict[str, Any]]:
    """Measure the four kinds of replay in one setting."""
    rows = make_rows(rollouts)
    _, consistent = step(make_trainer(sampled), rows)
    trainer = make_trainer(trained)
    if disturbed:
        (row,) = rows
        disturb_choices(trainer, len(row.token_ids_L))
    lines = []
    for name, (routing, kept_sets) in REPLAYS.items():
        replayed = [
            dataclasses.replace(
                row,
                expert_ids_LMK=row.expert_ids_LMK if routing else None,
                kept_tokens=row.kept_tokens if kept_sets else all_kept(row.num_targets),
            )
            for row in rows
        ]
        metrics, gradient = step(trainer, replayed)
        lines.append(
            {
                "setting": setting,
                "replayed": name,
                "abs_mean": metrics["mismatch/logprob_abs_mean"],
                "abs_max": metrics["mismatch/logprob_abs_max"],
                "kl": metrics["mismatch/kl"],
                # Missing without replayed routing.
                "disagreement_share": metrics.get("routing/disagreement_share"),
                "gradient_cosine": float(torch.cosine_similarity(gradient, consistent, dim=0)),
            }
        )
    return lines


def measure(model: Path, num_groups: int) -> list[dict[str, Any]]:
    """Measure all settings."""
    context = multiprocessing.get_context("spawn")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mismatch-") as scratch, context.Pool(1) as pool:
        bf16 = write_changed(model, Path(scratch) / "bf16", rounded)
        noisy = write_changed(model, Path(scratch) / "noisy", noisy_gate)
        of_model = pool.apply(sample, (model, num_groups))
        # An engine changes its process, so the second one gets another.
        with context.Pool(1) as second:
            of_bf16 = second.apply(sample, (bf16, num_groups))
        lines += compare("same weights", of_model, model, model)
        lines += compare("bf16 generator", of_bf16, model, bf16)
        lines += compare("noisy choice", of_model, model, model, disturbed=True)
        lines += compare("noisy gate", of_model, noisy, model)
    return lines


def cells(line: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    share = line["disagreement_share"]
    numbers = [f"{line[key]:.1e}" for key in ("abs_mean", "abs_max", "kl")]
    numbers += ["" if share is None else f"{share:.2%}", f"{line['gradient_cosine']:.5f}"]
    return [line["setting"], line["replayed"], *numbers]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "mismatch.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with group_of_one("gloo"):
        lines = measure(arguments.model, arguments.groups)
    print_table(
        "abs(trainer logprob - generator logprob)",
        ("setting", "replayed", "mean", "max", "KL", "other experts", "gradient cosine"),
        map(cells, lines),
        num_names=2,
    )
    write_json(arguments.out, {"machine": machine_facts(), "rows": lines})


if __name__ == "__main__":
    main()
