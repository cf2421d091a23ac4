"""A teacher behind the HTTP server of vLLM says of tokens what an engine of ours says of them."""

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from forgeasync.config import GeneratorSection, TeacherEndpoint
from forgeasync.models import read_model_facts
from forgeasync.rollouts import TeacherRecord
from forgeasync.testing import write_tiny_model
from tests.support.engines import NO_RECORDS, start_engine
from tests.support.processes import run_alone

NUM_IDS, NUM_PROMPT = 4, 3


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
    from transformers import AutoTokenizer

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
