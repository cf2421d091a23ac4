"""What engines and servers of vLLM say of given tokens, against transformers, and what is refused of it."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.logprobs import FlatLogprobs

from forgeasync.config import GeneratorSection, TeacherEndpoint
from forgeasync.generator import read_given_scores, read_scores
from forgeasync.models import read_model_facts
from forgeasync.rollouts import NO_ID, TeacherRecord, WrongTeacherRecord
from forgeasync.testing import write_tiny_model
from tests.support.engines import NO_RECORDS, start_engine
from tests.support.processes import run_alone

NUM_IDS, NUM_PROMPT = 6, 3


def given_ids(num_tokens: int, vocab_size: int) -> np.ndarray:
    """Up to ``NUM_IDS`` ids for every token, none for some."""
    rng = np.random.default_rng(num_tokens)
    ids_TK = np.sort(rng.permuted(np.tile(np.arange(vocab_size), (num_tokens, 1)), axis=1)[:, :NUM_IDS])
    ids_TK[np.arange(NUM_IDS) >= rng.integers(0, NUM_IDS + 1, (num_tokens, 1))] = NO_ID
    return ids_TK.astype(np.int32)


async def _score(folder: Path, sequences: list[np.ndarray]) -> list[TeacherRecord]:
    """All at once, twice each and by all ways, in an engine that computes 48 tokens a step."""
    from forgeasync.generator import score_given_ids, score_tokens

    generator = GeneratorSection(max_num_batched_tokens=48, max_num_seqs=16, kv_cache_gib=0.01)
    engine = await start_engine(folder, generator, records=NO_RECORDS, num_scored_ids=NUM_IDS + 1)
    found = await asyncio.gather(
        *(
            score
            for ids_S in (*sequences, *sequences)
            for score in (
                score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=NUM_IDS),
                score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=0),
                score_given_ids(
                    engine,
                    ids_S,
                    given_ids(len(ids_S) - NUM_PROMPT, engine.vocab_size),
                    num_prompt=NUM_PROMPT,
                ),
            )
        )
    )
    engine.shutdown()
    return list(found)


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """In pieces of a step, beside others, and where a prefix was computed for somebody else before."""
    folder = write_tiny_model(tmp_path / "hf", scale=4.0)
    rng = np.random.default_rng(0)
    vocab_size = read_model_facts(str(folder)).vocab_size
    sequences = [rng.integers(0, vocab_size, length).astype(np.int32) for length in (4, 40, 159)]
    found = run_alone(_score, folder, sequences)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    for number, ids_S in enumerate((*sequences, *sequences)):
        wide, narrow, given = found[3 * number : 3 * number + 3]
        ids = torch.from_numpy(ids_S.astype(np.int64))
        with torch.no_grad():
            logprobs_TV = model(ids[None]).logits[0, NUM_PROMPT - 1 : -1].log_softmax(-1)
        expected_T = logprobs_TV.gather(1, ids[NUM_PROMPT:, None])[:, 0]
        for one in (wide, narrow, given):
            np.testing.assert_allclose(one.logprobs_T, expected_T, atol=5e-5)
        assert narrow.ids_TK.shape == (len(ids_S) - NUM_PROMPT, 0)
        likeliest = logprobs_TV.topk(NUM_IDS)
        np.testing.assert_allclose(wide.topk_TK, likeliest.values, atol=5e-5)
        of_ids_TK = logprobs_TV.gather(1, torch.from_numpy(wide.ids_TK.astype(np.int64)))
        np.testing.assert_allclose(wide.topk_TK, of_ids_TK, atol=5e-5)
        scored_ids_TK = given_ids(len(ids_S) - NUM_PROMPT, vocab_size)
        np.testing.assert_array_equal(given.ids_TK, scored_ids_TK)
        expected_TK = logprobs_TV.gather(
            1, torch.from_numpy(scored_ids_TK.clip(min=0).astype(np.int64))
        ).numpy()
        np.testing.assert_allclose(
            given.topk_TK, np.where(scored_ids_TK == NO_ID, np.nan, expected_TK), atol=5e-5
        )
        assert (given.versions_T == 0).all()


def answer(ids: list[int], *, others: list[int], skip: int | None = None) -> SimpleNamespace:
    flat = FlatLogprobs()
    flat.append(None)
    for place, token in enumerate(ids[1:], start=1):
        if place == skip:
            flat.append(None)
            continue
        flat.append_fast([token, *others], [-1.0, *([-2.0] * len(others))], iter([1] * 9), [None] * 9)
    sampled = SimpleNamespace(weight_versions=[SimpleNamespace(version="3")])
    return SimpleNamespace(prompt_logprobs=flat, outputs=[sampled])


def test_an_answer_about_other_tokens_is_refused() -> None:
    ids_S = np.arange(6, dtype=np.int32)
    right = read_scores(answer([0, 1, 2, 3, 4, 5], others=[7, 8]), ids_S, num_prompt=2, num_ids=2)
    assert right.ids_TK.tolist() == [[7, 8]] * 4 and right.logprobs_T.tolist() == [-1.0] * 4
    assert right.versions_T.tolist() == [3] * 4
    for wrong, said in (
        (answer([0, 1, 2, 9, 4, 5], others=[7, 8]), "token 9 at position 3; must be token 3"),
        (answer([0, 1, 2, 3, 4], others=[7, 8]), "scored 5 positions; must be 6"),
        (answer([0, 1, 2, 3, 4, 5], others=[7]), "other than 2 ids and the token at position 2"),
        (answer([0, 1, 2, 3, 4, 5], others=[7, 8], skip=4), "other than 2 ids and the token at position 4"),
    ):
        with pytest.raises(WrongTeacherRecord, match=said):
            read_scores(wrong, ids_S, num_prompt=2, num_ids=2)


@pytest.mark.parametrize("found", [None, np.zeros((3, 2)), np.zeros((4, 1))])
def test_an_answer_about_fewer_ids_is_refused(found: np.ndarray | None) -> None:
    output = SimpleNamespace(prompt_token_id_logprobs=found)
    with pytest.raises(WrongTeacherRecord, match=r"must be \[4, 2\]"):
        read_given_scores(output, np.zeros((4, 2), np.int32))


async def _ask_both(
    folder: Path, sequences: list[np.ndarray]
) -> tuple[list[TeacherRecord], list[TeacherRecord], list[str | None]]:
    import uvicorn
    from starlette.datastructures import State
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from forgeasync.generator import score_tokens
    from forgeasync.scoring import TeacherClient

    generator = GeneratorSection(max_num_batched_tokens=64, kv_cache_gib=0.01)
    engine = await start_engine(folder, generator, records=NO_RECORDS, num_scored_ids=NUM_IDS)
    own = [await score_tokens(engine, one, num_prompt=NUM_PROMPT, num_ids=NUM_IDS) for one in sequences]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(folder), "--served-model-name", "large"]
    )
    app = build_app(arguments, ("generate",))
    assert isinstance(app.state, State)
    await init_app_state(engine._llm, app.state, arguments, ("generate",))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        client = TeacherClient(TeacherEndpoint(base_url=url, model="large"))
        found = [await client.score(one, num_prompt=NUM_PROMPT, num_ids=NUM_IDS) for one in sequences]
        _, texts = await client.probe(sequences[0], num_ids=0)
        await client.close()
        server.should_exit = True
        await serving
    engine.shutdown()
    return own, found, texts


@pytest.mark.exhaustive
def test_the_server_of_a_teacher_says_what_its_engine_says(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", scale=4.0)
    rng = np.random.default_rng(0)
    vocab_size = read_model_facts(str(folder)).vocab_size
    sequences = [rng.integers(0, vocab_size, length).astype(np.int32) for length in (4, 60, 150)]
    own, found, texts = run_alone(_ask_both, folder, sequences)
    for one, other in zip(own, found, strict=True):
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-5)
        np.testing.assert_allclose(one.topk_TK, other.topk_TK, atol=1e-5)
        assert (one.ids_TK == other.ids_TK).mean() > 0.99, "but for ties"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert texts == [tokenizer.decode([token]) for token in sequences[0][1:].tolist()]
