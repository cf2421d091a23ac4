"""Host time of a decode step: our engine and vLLM's own, over an executor that returns at once.

    python benchmarks/host_time.py [--sequences 44,128,256,512] [--rounds N] [--out FILE.json]

The executor returns made-up tokens with log-probabilities, kept sets of 20 ids, and experts of 48 layers x 8,
in the form of vLLM's GPU model runner. So a step takes what scheduling, records and output handling take,
which a GPU waits for unless it is hidden behind the forward pass. Engines take turns, round after round:

- ours: ``GeneratorEngine`` with groups of 8, versions, and the log of tokens in flight; one process
- vLLM: ``AsyncLLM`` with the same arguments and requests; its engine core is another process

Each time is the difference between long and short responses over the number of steps between them.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine_facts, print_table, write_json
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput, SamplingMaskLists

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.generator import GeneratorEngine
from forgeasync.rollouts import CaptureSpec
from forgeasync.testing import write_tiny_model

NUM_LAYERS, NUM_EXPERTS, TOP_K_EXPERTS = 48, 128, 8
NUM_KEPT = 20
GROUP_SIZE = 8
SHORT, LONG = 32, 160
"""Tokens of short and long responses."""
MAX_CONTEXT = 1024
PROMPT = [6] * 64
TOKEN = 7
"""What the executor samples, which ends no response."""

# vLLM wants the model runner of GPUs, which the executor replaces, for records. Its engine core is a process
# that imports this module.
VllmConfig._verify_sampling_replay_config = VllmConfig._verify_aux_output_compatibility = lambda _: None

Sample = Callable[[int, int], Awaitable[None]]
"""Samples a number of sequences with a number of tokens each."""


class InstantExecutor(Executor):
    """Executor without a model: each step's results are there at once."""

    supports_async_scheduling = staticmethod(lambda: True)
    """As on GPUs, a step is scheduled before the results of the one before are handled."""

    def _init_executor(self) -> None:
        self._ends: dict[str, tuple[int, int]] = {}
        """Of each request: number of tokens whose experts were returned, and number of computed tokens."""
        rows = np.random.default_rng(0).integers(0, NUM_EXPERTS, (MAX_CONTEXT, NUM_LAYERS, TOP_K_EXPERTS))
        self._rows = rows.astype(np.uint8)

    def collective_rpc(self, method: Any, *_: Any, **options: Any) -> Any:
        """Answer what the engine core asks while it starts."""
        spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
        answers = {
            "get_kv_cache_spec": {f"model.layers.{i}.self_attn.attn": spec for i in range(NUM_LAYERS)},
            "determine_available_memory": 64 * 2**30,
            "get_supported_kv_cache_layouts": ["NHD"],
            "get_supported_tasks": ("generate",),
        }
        return [answers[method]] if method in answers else []

    def check_health(self) -> None:
        """Do nothing."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Keep the step for ``sample_tokens``."""
        self._num_tokens = scheduler_output.num_scheduled_tokens
        for request in scheduler_output.scheduled_new_reqs:
            self._ends[request.req_id] = (0, request.num_computed_tokens)
        return done(None if self._num_tokens else EMPTY_MODEL_RUNNER_OUTPUT)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the results of the step that was begun last."""
        num = len(self._num_tokens)
        routed = {}
        for name, num_tokens in self._num_tokens.items():
            start, end = self._ends[name]
            end += num_tokens
            routed[name] = AuxRequestOutput(start, self._rows[start:end])
            self._ends[name] = (end, end)
        ids = np.full((num, 1), TOKEN, np.int64)
        kept = np.tile(np.arange(NUM_KEPT, dtype=np.int32), num)
        return done(
            ModelRunnerOutput(
                req_ids=list(routed),
                req_id_to_index={name: index for index, name in enumerate(routed)},
                sampled_token_ids=ids.tolist(),
                logprobs=LogprobsLists(ids, np.full((num, 1), -1.0, np.float32), ids[:, 0]),
                sampling_masks=SamplingMaskLists(kept, np.arange(0, len(kept) + 1, NUM_KEPT)),
                aux_output_connector_output=routed,
            )
        )


def done(result: Any) -> Future[Any]:
    """Return a future with a result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def use_instant_executor() -> None:
    """Have engines of this process run ``InstantExecutor`` as engines on GPUs run theirs."""
    Executor.get_class = staticmethod(lambda _: InstantExecutor)
    create = AsyncEngineArgs.create_engine_config

    def create_engine_config(self: AsyncEngineArgs, *arguments: Any, **options: Any) -> VllmConfig:
        self.return_sampling_mask = self.aux_output_config.enable_return_routed_experts = True
        config = create(self, *arguments, **options)
        # vLLM's platform for CPUs turns it off.
        config.scheduler_config.async_scheduling = True
        return config

    AsyncEngineArgs.create_engine_config = create_engine_config


async def start_ours(model: Path, section: GeneratorSection) -> tuple[Sample, Any]:
    """Start our engine; return a function that samples, and the engine."""
    engine = await GeneratorEngine.start(
        model_path=model,
        generator=section,
        max_context_length=MAX_CONTEXT,
        seed=0,
        records=CaptureSpec(routing=True, kept_tokens=True),
        weights=WeightsSection(),
        in_flight=model / "in-flight",
    )
    group_ids = itertools.count()
    prompt_ids_P = np.asarray(PROMPT, np.int32)

    async def group(size: int, sampling: SamplingSection) -> None:
        number = next(group_ids)
        await engine.generate(prompt_ids_P=prompt_ids_P, num_samples=size, sampling=sampling, group_id=number)
        engine.forget_group(number)

    async def sample(num_sequences: int, num_tokens: int) -> None:
        sampling = SamplingSection(top_k=NUM_KEPT, max_response_tokens=num_tokens)
        left = range(num_sequences, 0, -GROUP_SIZE)
        await asyncio.gather(*(group(min(GROUP_SIZE, one), sampling) for one in left))

    return sample, engine


async def start_theirs(model: Path, section: GeneratorSection) -> tuple[Sample, Any]:
    """Start vLLM's engine; as ``start_ours``."""
    arguments = AsyncEngineArgs(
        model=str(model),
        dtype="bfloat16",
        max_model_len=MAX_CONTEXT,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    llm = AsyncLLM.from_engine_args(arguments)
    names = itertools.count()
    at_end = RequestOutputKind.FINAL_ONLY

    async def request(params: SamplingParams) -> None:
        async for _ in llm.generate(tokens_input(PROMPT), params, str(next(names))):
            pass

    async def sample(num_sequences: int, num_tokens: int) -> None:
        records = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "output_kind": at_end}
        params = SamplingParams(top_k=NUM_KEPT, max_tokens=num_tokens, **records)
        await asyncio.gather(*(request(params) for _ in range(num_sequences)))

    return sample, llm


async def measure(sample: Sample, num_sequences: int) -> float:
    """Return milliseconds of a decode step."""
    times_s = []
    for num_tokens in (SHORT, LONG):
        start_s = time.perf_counter()
        await sample(num_sequences, num_tokens)
        times_s.append(time.perf_counter() - start_s)
    return (times_s[1] - times_s[0]) / (LONG - SHORT) * 1e3


async def compare(sizes: list[int], num_rounds: int, model: Path) -> list[dict[str, float]]:
    """Return medians over rounds for each number of sequences."""
    # Prompts are never computed in parts, which the executor does not know.
    num_batched = 2 * len(PROMPT) * max(sizes)
    section = GeneratorSection(max_num_seqs=max(sizes), max_num_batched_tokens=num_batched, kv_cache_gib=64.0)
    engines = [await start_ours(model, section), await start_theirs(model, section)]
    for sample, _ in engines:
        await sample(max(sizes), LONG)
    times_ms: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in sizes}
    for number, size in itertools.product(range(num_rounds), sizes):
        for which in (number % 2, 1 - number % 2):
            times_ms[size][which].append(await measure(engines[which][0], size))
    for _, engine in engines:
        engine.shutdown()
    rows = []
    for size, (ours, vllm) in times_ms.items():
        ratio = statistics.median(one / other for one, other in zip(ours, vllm, strict=True))
        medians = {"ours_ms": statistics.median(ours), "vllm_ms": statistics.median(vllm)}
        rows.append({"num_sequences": size, **medians, "ratio": ratio})
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="44,128,256,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "host_time.json")
    arguments = parser.parse_args()
    use_instant_executor()
    sizes = [int(one) for one in arguments.sequences.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", num_experts=NUM_EXPERTS, top_k=TOP_K_EXPERTS)
        sizes_of = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": MAX_CONTEXT}
        AutoConfig.from_pretrained(model, **sizes_of).save_pretrained(model)
        rows = asyncio.run(compare(sizes, arguments.rounds, model))
    cells = ("{num_sequences}", "{ours_ms:.2f} ms", "{vllm_ms:.2f} ms", "{ratio:.2f}")
    print_table(
        "host time of a decode step",
        ("sequences", "ours", "vLLM", "ratio"),
        ([cell.format(**row) for cell in cells] for row in rows),
        num_names=0,
    )
    write_json(arguments.out, {"machine": machine_facts(), "steps": rows})


if __name__ == "__main__":
    main()
