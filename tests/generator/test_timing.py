"""Timing an engine: the steps that are timed are those that were asked for."""

from pathlib import Path

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.generator import DecodeSteps, DecodeTiming, PrefillTiming
from forgeasync.testing import write_tiny_model
from tests.support.engines import start_engine
from tests.support.processes import run_alone
from tests.support.tiers import Starts, starts


@starts(Starts.ENGINE)
async def _time(folder: Path) -> tuple[list[float], dict[int, DecodeSteps], str]:
    from forgeasync.generator import NothingTimed, time_engine

    section = GeneratorSection(max_num_batched_tokens=64, max_num_seqs=8, kv_cache_gib=0.01)
    engine = await start_engine(folder, section)
    sampling = SamplingSection(max_response_tokens=4, top_k=5, top_p=0.9)
    asked = DecodeTiming(num_running=5, num_prompt_tokens=20, num_steps=12, text=(7, 8, 9))
    found = [await time_engine(engine, asked, sampling, seed=seed) for seed in (0, 0)]
    prompts = PrefillTiming(num_prompts=4, num_prompt_tokens=30, text=(7, 8, 9))
    found.append(await time_engine(engine, prompts, sampling, seed=1))
    counts = engine.stats().decode_steps
    try:
        # More than decode at once: no step has all of them.
        more = DecodeTiming(num_running=20, num_prompt_tokens=20, num_steps=4, text=(5,))
        words = str(await time_engine(engine, more, sampling, seed=2))
    except NothingTimed as error:
        words = str(error)
    engine.shutdown()
    return found, dict(counts), words


def test_steps_with_all_sequences_are_timed(tmp_path: Path) -> None:
    found, counts, words = run_alone(_time, write_tiny_model(tmp_path / "hf"))
    assert all(value > 0 for value in found)
    # 5 prompts of 20 tokens take two steps; from the one after, 10 or 11 steps decode 5 tokens, twice.
    assert set(counts) >= {3} and 18 <= counts[3].num_steps <= 22
    assert "of 20 sequences with 20 prompt tokens no step decoded one token each" in words
