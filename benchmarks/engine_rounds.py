"""Rounds of one engine that samples the same groups with the same seeds: what two variants of it cost.

64 sequences at once, cut by top-k 20 and top-p 0.9, with routing and kept sets recorded.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine

NUM_PROMPTS, NUM_SAMPLES = 16, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 30, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round."""

    num_tokens: int
    took_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.took_s


async def start_engine(model: Path, in_flight: Path | None) -> "GeneratorEngine":
    """Load a model; tokens in flight are logged in a folder, if one is given."""
    from forgeasync.config import GeneratorSection, WeightsSection
    from forgeasync.generator import GeneratorEngine
    from forgeasync.rollouts import Records

    return await GeneratorEngine.start(
        model_path=model,
        generator=GeneratorSection(max_num_seqs=64, max_num_batched_tokens=2048, kv_cache_gib=0.25),
        max_context_length=PROMPT_TOKENS + RESPONSE_TOKENS,
        seed=0,
        records=Records(routing=True, kept_tokens=True),
        weights=WeightsSection(),
        in_flight=in_flight,
    )


async def sample_round(engine: "GeneratorEngine", number: int, *, is_named: bool) -> Round:
    """Sample all groups of a round; those of ``is_named`` have an id, so that their tokens are logged.

    Rounds of one number are alike; others have prompts of their own, so that the prefix cache has no part.
    """
    from forgeasync.config import SamplingSection

    sampling = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=RESPONSE_TOKENS)
    rng = np.random.default_rng(number)
    prompts = rng.integers(3, 20, (NUM_PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    start_s = time.perf_counter()
    groups = await asyncio.gather(
        *(
            engine.generate(
                prompt_ids_P=prompt,
                num_samples=NUM_SAMPLES,
                sampling=sampling,
                seed=index,
                group_id=index if is_named else None,
            )
            for index, prompt in enumerate(prompts)
        )
    )
    took_s = time.perf_counter() - start_s
    num_tokens = sum(rollout.num_response_tokens for group in groups for rollout in group)
    return Round(num_tokens=num_tokens, took_s=took_s)


def order_of(number: int) -> tuple[str, str]:
    """Return which variant of a pair of rounds comes first: they take turns."""
    return ("off", "on") if number % 2 else ("on", "off")


def print_ratio(console: Console, what: str, found: Mapping[str, Sequence[float]]) -> float:
    """Print tokens/s without and with something, and return the median ratio of neighbouring rounds."""
    ratio = statistics.median(on / off for on, off in zip(found["on"], found["off"], strict=True))
    table = Table(title=f"generated tokens/s, {NUM_PROMPTS * NUM_SAMPLES} sequences at once")
    for column in (what, "tokens/s", "ratio to off"):
        table.add_column(column, justify="left" if column == what else "right")
    table.add_row("off", f"{statistics.median(found['off']):.0f}", "1.000")
    table.add_row("on", f"{statistics.median(found['on']):.0f}", f"{ratio:.3f}")
    console.print(table)
    return ratio
