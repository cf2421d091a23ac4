"""Scores of a teacher whose weights change under load: each names its version, and has that version's only.

Every version's weights make one token likely everywhere, by a margin: token and margin together are no other
version's. So each position of a score reveals which weights have computed it.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from forgeasync.config import GeneratorSection, WeightsSection, weights_of_teacher
from forgeasync.models import read_model_facts
from forgeasync.rollouts import TeacherRecord
from forgeasync.testing import write_tiny_model
from tests.generator.conftest import Seen
from tests.support.engines import NO_RECORDS, revealing_weights, start_engine, update
from tests.support.processes import run_alone

NUM_UPDATES, NUM_AT_ONCE, NUM_PROMPT = 200, 4, 3
HIDDEN_SIZE = 64


def margin(version: int, num_tokens: int) -> float:
    """How far the logit of token ``version % num_tokens`` is above all others, which are equal."""
    return 0.64 * (1 + version // num_tokens)


def revealing(folder: Path, version: int, num_tokens: int) -> dict[str, torch.Tensor]:
    token = version % num_tokens
    weights = revealing_weights(folder, token)
    weights["lm_head.weight"][token] = margin(version, num_tokens) / HIDDEN_SIZE
    return weights


def assert_reveals(record: TeacherRecord, version: int, num_tokens: int) -> None:
    """Every position was computed by the weights of ``version``."""
    assert (record.versions_T == version).all() and (record.ids_TK[:, 0] == version % num_tokens).all()
    expected = -np.log1p((num_tokens - 1) * np.exp(-margin(version, num_tokens)))
    np.testing.assert_allclose(record.topk_TK[:, 0], expected, atol=1e-4)


async def _score_under_updates(folder: Path, num_tokens: int) -> Seen:
    """Scores without end beside updates, each of which waits only until some score has come.

    Records come with the versions that the engine had when they were asked for and when they came.
    """
    from forgeasync.generator import score_given_ids, score_tokens

    rng = np.random.default_rng(0)
    ids_S = rng.integers(0, num_tokens, 150).astype(np.int32)

    # A score takes several steps.
    generator = GeneratorSection(max_num_batched_tokens=48, max_num_seqs=16, kv_cache_gib=0.01)
    engine = await start_engine(
        folder,
        generator,
        weights_of_teacher(WeightsSection()),
        records=NO_RECORDS,
        num_scored_ids=1 + num_tokens,
    )
    scores: list[tuple[int, TeacherRecord, int]] = []
    version, came, num_cut = 0, asyncio.Event(), 0

    async def of_all_ids() -> TeacherRecord:
        """The likeliest of all ids, which were given."""
        every_TV = np.tile(np.arange(num_tokens, dtype=np.int32), (len(ids_S) - NUM_PROMPT, 1))
        found = await score_given_ids(engine, ids_S, every_TV, num_prompt=NUM_PROMPT)
        likeliest_T1 = found.topk_TK.argmax(-1)[:, None]
        return replace(
            found,
            ids_TK=likeliest_T1.astype(np.int32),
            topk_TK=np.take_along_axis(found.topk_TK, likeliest_T1, 1),
        )

    async def load(number: int) -> None:
        while version < NUM_UPDATES:
            before = version
            if number % 2:
                record = await of_all_ids()
            else:
                record = await score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=1)
            scores.append((before, record, version))
            came.set()

    async def move() -> None:
        nonlocal version, num_cut
        for number in range(1, NUM_UPDATES + 1):
            report = await update(engine, number, revealing(folder, number, num_tokens))
            version = number
            num_cut += report.num_recomputed
            came.clear()
            await came.wait()

    await asyncio.gather(move(), *(load(number) for number in range(NUM_AT_ONCE)))

    async def torn() -> None:
        raise ConnectionError("the trainer is gone")

    failed = await asyncio.gather(
        engine.update_weights(NUM_UPDATES + 1, prefetch=torn, install=lambda core: None),
        return_exceptions=True,
    )
    assert isinstance(failed[0], ConnectionError)
    last = await score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=1)
    engine.shutdown()
    return Seen(scores=scores, num_cut=num_cut, after_failure=last)


def test_every_score_has_the_version_that_it_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    num_tokens = read_model_facts(str(folder)).vocab_size
    seen = run_alone(_score_under_updates, folder, num_tokens)
    named = set()
    for before, record, after in seen.scores:
        (version,) = set(record.versions_T.tolist())
        named.add(version)
        # The swap may be made before its report has come.
        assert before <= version <= after + 1
        if version:
            assert_reveals(record, version, num_tokens)
    assert len(seen.scores) >= NUM_UPDATES and len(named) > NUM_UPDATES // 2
    assert seen.num_cut > NUM_UPDATES // 4, "swaps come in the middle of scores"
    assert_reveals(seen.after_failure, NUM_UPDATES, num_tokens)
