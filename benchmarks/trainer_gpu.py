"""The trainer on one GPU, with a Qwen3-MoE that fills it: tokens/s, MFU, where the time goes.

    python benchmarks/trainer_gpu.py [--steps N] [--peak-tflops T] [--out FILE.json]

Layers of Qwen3-30B-A3B, as many as training fits, with random weights; bfloat16 compute, full activation
checkpointing, lognormal lengths. MFU counts the products of active parameters and of causal attention, three
times the forward pass: what checkpointing computes again does not count. Shares of the time are of what the
device spent in the operators of grouped matrix products and of attention, by torch.profiler.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from buffer_simulation import LengthModel
from common import RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig

from forgeasync.algorithms import Loss
from forgeasync.config import ActivationCheckpointing, Dtype, ModelFacts, OptimizerSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import PackedRow, PolicyTrainer, TrainerSetup, TrainingSequence, pack_rows

RESPONSES = LengthModel(median=512.0, sigma=1.0, shortest=64, longest=4096)
PROMPT_TOKENS = 256
TOKENS_PER_ROW = 16384
NUM_SEQUENCES = 128
BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in float32."""
STATE_SHARE = 0.6
"""Share of GPU memory for weights and optimizer state; activations and gathered layers have the rest."""
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense bfloat16, by a part of the device's name; from NVIDIA's data sheets."""
OPERATORS = {
    "grouped GEMM": ("aten::_grouped_mm",),
    "attention": ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"),
}


def model_config(num_layers: int) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B with another number of layers."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        dtype="float32",
    )


def matrix_parameters(facts: ModelFacts, *, num_experts: int) -> int:
    """Parameters that multiply a token going through ``num_experts`` experts in every layer."""
    attention = 2 * facts.hidden_size * facts.head_dim * (facts.num_heads + facts.num_kv_heads)
    experts = 3 * facts.hidden_size * facts.expert_hidden_size * num_experts
    gate = facts.hidden_size * facts.num_experts
    return facts.num_layers * (attention + experts + gate) + facts.hidden_size * facts.vocab_size


def write_largest_model(folder: Path) -> ModelFacts:
    """The config of a model whose training state takes ``STATE_SHARE`` of the GPU."""
    _, total_bytes = torch.cuda.mem_get_info()
    room = STATE_SHARE * total_bytes / BYTES_PER_PARAMETER
    num_layers = 0
    while True:
        model_config(num_layers + 1).save_pretrained(folder)
        facts = read_model_facts(str(folder))
        embedding = facts.hidden_size * facts.vocab_size
        if matrix_parameters(facts, num_experts=facts.num_experts) + embedding > room:
            break
        num_layers += 1
    if num_layers == 0:
        raise ValueError(f"a GPU of {total_bytes / 2**30:.0f} GiB has no room for one layer of this model")
    model_config(num_layers).save_pretrained(folder)
    return read_model_facts(str(folder))


def make_sequences(facts: ModelFacts) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(NUM_SEQUENCES):
        (num_response,) = RESPONSES.sample(RESPONSES.of_prompt(rng), 1, rng)
        ids = rng.integers(0, facts.vocab_size, PROMPT_TOKENS + num_response).astype(np.int32)
        sequences.append(
            TrainingSequence(
                prompt_ids_P=ids[:PROMPT_TOKENS],
                response_ids_T=ids[PROMPT_TOKENS:],
                behavior_logprobs_T=np.full(num_response, -np.log(facts.vocab_size), np.float32),
                ages_T=np.zeros(num_response, np.int32),
                advantage=float(rng.standard_normal()),
            )
        )
    return sequences


def step_flops(facts: ModelFacts, sequences: Sequence[TrainingSequence]) -> float:
    """Floating-point operations of forward and backward pass; logits of response tokens only."""
    head = facts.hidden_size * facts.vocab_size
    body = matrix_parameters(facts, num_experts=facts.top_k) - head
    tokens = sum(sequence.num_tokens for sequence in sequences)
    targets = sum(len(sequence.response_ids_T) for sequence in sequences)
    # Scores and their product with the values, over half of all pairs.
    pairs = sum(sequence.num_tokens**2 / 2 for sequence in sequences)
    attention = 4 * facts.num_layers * facts.num_heads * facts.head_dim * pairs
    return 3.0 * (2.0 * body * tokens + 2.0 * head * targets + attention)


def build_trainer(facts: ModelFacts) -> PolicyTrainer:
    """Build a trainer of a model with random weights."""
    section = TrainerSection(
        dtype=Dtype.BFLOAT16,
        tokens_per_row=TOKENS_PER_ROW,
        activation_checkpointing=ActivationCheckpointing.FULL,
        replay_probe_share=0.0,
        optimizer=OptimizerSection(learning_rate=1e-6),
    )
    setup = TrainerSetup(
        section=section,
        facts=facts,
        temperature=1.0,
        loss=Loss(),
        seed=0,
        checkpoint=None,
    )
    return PolicyTrainer(setup)


def time_shares(trainer: PolicyTrainer, rows: Sequence[PackedRow]) -> dict[str, float]:
    """Return shares of the device's time in one step, by kind of operator."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trainer.train_step(rows)
        torch.cuda.synchronize()
    events = profiler.key_averages()
    total_us = sum(event.self_device_time_total for event in events)
    return {
        kind: sum(event.device_time_total for event in events if event.key in names) / total_us
        for kind, names in OPERATORS.items()
    }


def peak_flops(given_tflops: float | None) -> float:
    """Of this GPU per second.

    Raises:
        ValueError: it is not in the table and nothing was given.
    """
    name = torch.cuda.get_device_name()
    known = [peak for part, peak in PEAK_TFLOPS.items() if part in name]
    if given_tflops is None and not known:
        raise ValueError(f"--peak-tflops is missing: {name!r} is none of {', '.join(PEAK_TFLOPS)}")
    return 1e12 * (known[0] if given_tflops is None else given_tflops)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="The trainer on one GPU.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, where the GPU is not known")
    parser.add_argument("--out", type=Path, default=RESULTS / "trainer_gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("trainer_gpu.py needs a CUDA GPU; trainer_throughput.py measures on a CPU")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29543", "RANK": "0", "WORLD_SIZE": "1"}
    peak = peak_flops(arguments.peak_tflops)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.autograd.set_multithreading_enabled(False)
    with tempfile.TemporaryDirectory() as scratch:
        facts = write_largest_model(Path(scratch))
    trainer = build_trainer(facts)
    sequences = make_sequences(facts)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=1)[0]
    times_s = []
    for number in range(arguments.steps + 1):
        start_s = time.perf_counter()
        trainer.train_step(rows)
        torch.cuda.synchronize()
        if number:  # the first step warms up
            times_s.append(time.perf_counter() - start_s)
    step_s = statistics.median(times_s)
    found = {
        "layers": facts.num_layers,
        "tokens_per_s": sum(sequence.num_tokens for sequence in sequences) / step_s,
        "mfu": step_flops(facts, sequences) / step_s / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "time_shares": time_shares(trainer, rows),
    }
    dist.destroy_process_group()
    table = Table(title=f"trainer on {torch.cuda.get_device_name()}")
    for column in ("layers", "tokens/s", "MFU", "peak GiB", *found["time_shares"]):
        table.add_column(column, justify="right")
    table.add_row(
        str(found["layers"]),
        f"{found['tokens_per_s']:,.0f}",
        f"{found['mfu']:.1%}",
        f"{found['peak_memory_gib']:.1f}",
        *(f"{share:.1%}" for share in found["time_shares"].values()),
    )
    Console(width=100).print(table)
    write_json(arguments.out, {"machine": machine_facts(), "step_s": times_s, **found})


if __name__ == "__main__":
    main()
