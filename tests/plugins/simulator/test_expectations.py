"""docs/gpu.md: what the planner expects of our configs, and of runs that others published."""

import statistics

import pytest

from forgeasync.config import RunConfig, load_config, resolve
from forgeasync.models import read_model_facts
from forgeasync.plugins.simulator import (
    DecodeTable,
    Prediction,
    Profile,
    of_config,
    simulate,
    stated_profile,
)
from tests.support.config_samples import CONFIGS

PAGE = CONFIGS.parent / "docs" / "gpu.md"
PROMPT_TOKENS = 256


def _expected(
    name: str, *overrides: str, tokens: float, num_steps: int
) -> tuple[RunConfig, Profile, Prediction, int]:
    """A config with its stated profile, its prediction and its number of GPUs."""
    config = load_config(CONFIGS / f"{name}.yaml", list(overrides))
    facts = read_model_facts(config.model.path)
    config = resolve(config, facts)
    profile = stated_profile(config, facts, mean_response_tokens=tokens)
    prediction = simulate(of_config(config, facts, profile, num_steps=num_steps), profile)
    generator = config.generator
    num_gpus = config.trainer.parallel.num_procs + generator.num_replicas * generator.tensor_parallel
    return config, profile, prediction, num_gpus


def test_terms_of_our_configs() -> None:
    rows: dict[str, list[str]] = {}
    for name in ("qwen3_8b", "qwen3_30b_a3b"):
        config, profile, prediction, num_gpus = _expected(name, tokens=12_000, num_steps=30)
        num_seqs, weights = config.generator.max_num_seqs, profile.weights
        decode_ms = 1e3 * DecodeTable(profile.decode).step_s(num_seqs, 6_000)
        train_s = statistics.fmean(step.train_s for step in prediction.steady)
        times = (weights.publish_s, weights.fetch_s, weights.swap_s)
        values = {
            "GPUs": str(num_gpus),
            "decode step": f"{decode_ms:.0f} ms with {num_seqs} sequences",
            "training on a batch": f"{train_s:.0f} s",
            "publish, fetch, pause": ", ".join(f"{one.mean:.1f}" for one in times) + " s",
            "step": f"{prediction.step_s:.0f} s",
            "trained tokens per second and GPU": f"{prediction.trained_tokens_per_s / num_gpus:.0f}",
        }
        for term, value in values.items():
            rows.setdefault(term, []).append(value)
    page = PAGE.read_text(encoding="utf-8")
    for term, values in rows.items():
        assert f"| {term} | {' | '.join(values)} |" in page


@pytest.mark.parametrize(
    ("name", "model", "parallel", "generator", "sequence", "longest", "num_rollouts", "published_s"),
    [
        ("qwen3_30b_a3b", "Qwen3-30B-A3B", "num_procs: 16, expert: 8", (8, 2), 3_158, 4_096, 2_048, 244),
        ("qwen3_32b", "Qwen3-32B", "num_procs: 32, tensor: 4", (8, 4), 3_207, 4_096, 2_048, 215),
        (
            *("qwen3_235b_a22b", "Qwen3-235B-A22B", "num_procs: 128, tensor: 4, expert: 16", (16, 8)),
            *(5_691, 8_192, 512, 241),
        ),
    ],
)
def test_published_runs(
    name: str,
    model: str,
    parallel: str,
    generator: tuple[int, int],
    sequence: int,
    longest: int,
    num_rollouts: int,
    published_s: int,
) -> None:
    """Groups of 32, and optimizer steps of 512 rollouts, one step off policy."""
    num_replicas, tensor = generator
    _, _, prediction, num_gpus = _expected(
        name,
        *(f"model.max_context_length={longest}", f"trainer.tokens_per_row={2 * longest}"),
        *(f"sampling.max_response_tokens={longest - PROMPT_TOKENS}", "max_off_policy_steps=1"),
        *(f"trainer.parallel={{{parallel}}}", f"trainer.steps_per_batch={num_rollouts // 512}"),
        *(f"generator.num_replicas={num_replicas}", f"generator.tensor_parallel={tensor}"),
        *(f"generator.max_num_seqs={2 * num_rollouts // num_replicas}", "buffer.max_in_flight=null"),
        *("algorithm.group_size=32", f"algorithm.groups_per_step={num_rollouts // 32}"),
        "trainer.share_prefixes=false",
        tokens=sequence - PROMPT_TOKENS,
        num_steps=24,
    )
    row = f"| {model} | {num_gpus} | {sequence:,} | {published_s} s | {prediction.step_s:.0f} s |"
    assert row in PAGE.read_text(encoding="utf-8")
