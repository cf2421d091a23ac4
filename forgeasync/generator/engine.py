"""A vLLM engine that samples groups of rollouts and takes new weights between two decode steps.

Plain asyncio, no Monarch: the generator actor is a thin shell around this class.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.generator.in_flight_recorder import PART_ARGUMENT, TURN_ARGUMENT, InFlightRecorder
from forgeasync.generator.reports import (
    BusyClock,
    DecodeSteps,
    DecodeTiming,
    EngineStats,
    GroupCancelled,
    PrefillTiming,
    SwapReport,
)
from forgeasync.generator.turns import (
    EngineEpisode,
    EngineTurn,
    SequenceReader,
    TurnEnd,
    check_continued,
    part_seed,
)
from forgeasync.generator.updates import (
    AdmissionGate,
    Groups,
    Prefetch,
    RunningGroup,
    WeightUpdates,
    request_arguments,
)
from forgeasync.generator.workarounds.inprocess_client import InProcessAsyncClient, scheduler_of, start_llm
from forgeasync.generator.workarounds.served_adapters import (
    AdapterSetup,
    ServedAdapter,
    engine_modules,
    engine_rank,
    install,
)
from forgeasync.generator.workarounds.vllm_process import (
    adapt_process,
    compute_batch_invariantly,
    expand_latents,
    gpu_share,
    rotate_in_torch,
)
from forgeasync.observability import State, doing
from forgeasync.rollouts import CaptureSpec, FinishReason, LoggedTurn, Rollout

R = TypeVar("R")

CPU_WORKER = "forgeasync.generator.workarounds.cpu_worker.UpdatableCPUWorker"

GPU_WORKER_EXTENSION = "forgeasync.generator.gpu_worker.UpdatableGPUWorker"

MOST_TRIES = 5
"""When other processes have the cores, sequences may begin so far apart that they never all decode."""

NUM_RANDOM = 2
"""Tokens at the begin of a prompt that are drawn: no two prompts have a prefix in common, or the engine would
compute it once."""


def engine_args(
    *,
    model_path: Path,
    generator: GeneratorSection,
    max_context_length: int,
    seed: int,
    records: CaptureSpec,
    adapters: AdapterSetup | None,
    is_cpu: bool,
    num_scored_ids: int = 0,
    gpu_bytes: int | None = None,
) -> AsyncEngineArgs:
    """Return vLLM's arguments for an engine of the CPU build or of another.

    Raises:
        ValueError: see ``gpu_share``.
    """
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=generator.dtype.value,
        max_model_len=max_context_length,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        tensor_parallel_size=generator.tensor_parallel,
        enable_expert_parallel=generator.expert_parallel,
        worker_cls=CPU_WORKER if is_cpu else "auto",
        worker_extension_cls="" if is_cpu else GPU_WORKER_EXTENSION,
        kv_cache_memory_bytes=int(generator.kv_cache_gib * 2**30),
        gpu_memory_utilization=gpu_share(gpu_bytes),
        enforce_eager=not generator.compile,
        # The distribution really drawn from: after temperature, top-k, top-p and min-p.
        logprobs_mode="processed_logprobs",
        max_logprobs=num_scored_ids,
        # Step outputs then belong to the weights of that very step, which makes version labels exact.
        async_scheduling=False,
        seed=seed,
        enable_return_routed_experts=records.routing and not is_cpu,
        return_sampling_mask=records.kept_tokens and not is_cpu,
        enable_lora=adapters is not None,
        max_lora_rank=16 if adapters is None else engine_rank(adapters.lora.rank),
        lora_target_modules=None if adapters is None else engine_modules(adapters),
    )


class GeneratorEngine:
    """One engine. Build it with ``await GeneratorEngine.start(...)`` inside an event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        client: InProcessAsyncClient,
        records: CaptureSpec,
        *,
        weights: WeightsSection,
        recorder: InFlightRecorder,
    ) -> None:
        model = llm.model_config
        self._llm = llm
        self._client = client
        self.vocab_size = model.get_vocab_size()
        # vLLM records kept sets only where top_k is set; the size of the vocabulary keeps all.
        self.all_kept = self.vocab_size if records.kept_tokens else 0
        """``top_k`` of requests whose sampling sets none."""
        self._recorder = recorder
        self.reader = SequenceReader(
            tokenizer=llm.get_tokenizer(),
            vocab_size=self.vocab_size,
            num_experts=model.get_num_experts(),
            num_dense_layers=records.num_dense_layers,
        )
        """Reads what the engine has sampled."""
        self._gate = AdmissionGate()
        self._groups = Groups()
        self._updates = WeightUpdates(
            client,
            self._groups,
            self._gate,
            interruption=weights.interruption,
            kv_cache=weights.kv_cache,
        )
        self.adapter: ServedAdapter | None = None
        """Adapter that all requests are served with; None if weights are whole."""
        self._request_ids = itertools.count()
        self._episode_numbers = itertools.count()
        self._num_generated_tokens = 0
        self.busy = BusyClock()
        """Runs while the engine has something to do."""

    @classmethod
    async def start(
        cls,
        *,
        model_path: Path,
        generator: GeneratorSection,
        max_context_length: int,
        seed: int,
        records: CaptureSpec,
        weights: WeightsSection,
        adapters: AdapterSetup | None = None,
        in_flight: Path | None = None,
        num_scored_ids: int = 0,
        gpu_bytes: int | None = None,
    ) -> "GeneratorEngine":
        """Load a Hugging Face folder as policy version 0; with ``adapters`` of it that vLLM serves.

        What named groups have in flight is logged in the folder ``in_flight``, which is made; None: nowhere.
        ``num_scored_ids`` is the most that ``forgeasync.generator.token_scores`` asks for. Each GPU must have
        ``gpu_bytes`` free; None: 92 % of it.
        """
        is_cpu = current_platform.is_cpu()
        adapt_process()
        if generator.batch_invariant:
            compute_batch_invariantly(is_cpu=is_cpu)
        if is_cpu:
            expand_latents()
        args = engine_args(
            model_path=model_path,
            generator=generator,
            max_context_length=max_context_length,
            seed=seed,
            records=records,
            adapters=adapters,
            is_cpu=is_cpu,
            num_scored_ids=num_scored_ids,
            gpu_bytes=None if is_cpu else gpu_bytes,
        )
        # In a thread, as the model itself is loaded (start_llm): the process answers meanwhile.
        vllm_config = await asyncio.to_thread(args.create_engine_config, UsageContext.ENGINE_CONTEXT)
        if is_cpu:
            # Imports the CPU build's model runner, which other builds need not have.
            from forgeasync.generator.workarounds.cpu_model_runner import request_records

            rotate_in_torch(vllm_config)
            request_records(vllm_config, routing=records.routing, kept_tokens=records.kept_tokens)
        vocab_size = vllm_config.model_config.get_vocab_size()
        recorder = InFlightRecorder(in_flight, records=records, vocab_size=vocab_size)
        llm = await start_llm(
            vllm_config, salt_with_version=not weights.prefix_cache_across_versions, observer=recorder
        )
        if is_cpu and num_scored_ids:
            from forgeasync.generator.workarounds.cpu_model_runner import accept_given_ids

            accept_given_ids(llm)
        engine = cls(llm, llm.engine_core, records, weights=weights, recorder=recorder)
        await engine._client.between_steps(lambda core: core.set_weight_version("0"))
        if adapters is not None:
            engine.adapter = ServedAdapter(adapters)
            zero = engine.adapter.write_zero()
            await engine._client.between_steps(lambda core: install(core, zero))
        return engine

    async def generate(
        self,
        *,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
        group_id: int | None = None,
        continued: Sequence[LoggedTurn] = (),
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> tuple[Rollout, ...]:
        """Sample ``num_samples`` responses to one prompt; a seed makes them reproducible.

        By its ``group_id`` a group can be cancelled, updates report its progress, and its tokens are logged
        until ``forget_group``. ``continued`` has what another engine had sampled of the group: those
        responses go on from there, and those that had ended stay as they are. ``on_finished`` is told of each
        response and its place in the group when it has ended.

        Raises:
            GroupCancelled: ``cancel`` was called with the group's id.
            ValueError: another group of this id is being sampled, or ``continued`` is of another group.
        """
        check_continued(continued, prompt_ids_P, num_samples, sampling)
        key, group = self.open_group(group_id)
        turns = [self.first_turn(self.new_episode(index)) for index in range(num_samples)]
        for turn in turns:
            turn.trajectory.give(prompt_ids_P)
        for restored in continued:
            turn = turns[restored.begun.episode.index]
            turn.restored = restored
            turn.episode.num_requests = restored.num_parts

        async def sample(index: int, turn: EngineTurn) -> Rollout:
            await self.sample_turn(
                turn,
                group_key=key,
                group=group,
                sampling=sampling,
                max_tokens=sampling.max_response_tokens,
                seed=seed,
            )
            (rollout,) = self.reader.rollouts([turn])
            if on_finished is not None:
                on_finished(index, rollout)
            return rollout

        tasks = [asyncio.create_task(sample(index, turn)) for index, turn in enumerate(turns)]
        try:
            return tuple(await asyncio.gather(*tasks))
        except BaseException:
            self.forget_group(key)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.close_group(key)

    def new_episode(self, sample: int, *, agent: int = 0, attempt: int = 0) -> EngineEpisode:
        """An episode without turns; ``sample`` is its place in its group."""
        return EngineEpisode(number=next(self._episode_numbers), sample=sample, agent=agent, attempt=attempt)

    def first_turn(self, episode: EngineEpisode) -> EngineTurn:
        """A turn without tokens, with nothing before it."""
        return EngineTurn(episode=episode, trajectory=self.reader.new_trajectory())

    def open_group(self, group_id: int | None) -> tuple[int, RunningGroup]:
        """A group that is sampled turn by turn until ``close_group``: its number in the engine and its state.

        By this number it can be cancelled, and updates report its progress unless ``group_id`` is None.

        Raises:
            ValueError: another group of this id is being sampled.
        """
        key, group = self._groups.open(group_id)
        if key >= 0:
            self._recorder.open_group(key)
        return key, group

    def close_group(self, group_key: int) -> None:
        """Close a group; no further turn of it is sampled. Its tokens stay logged until ``forget_group``."""
        self._groups.close(group_key)

    def forget_group(self, group_key: int) -> None:
        """Nobody will ask another engine to go on with the group."""
        self._recorder.forget_group(group_key)

    def forget_turns(self, turns: Sequence[EngineTurn]) -> None:
        """Nobody will ask another engine to go on with these turns of a group."""
        self._recorder.forget_turns([turn.log_key for turn in turns if turn.log_key is not None])

    async def sample_turn(
        self,
        turn: EngineTurn,
        *,
        group_key: int,
        group: RunningGroup,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
    ) -> None:
        """Sample one turn of the model, up to ``max_tokens``, in as many requests as swaps make of it.

        Raises:
            GroupCancelled: ``cancel`` was called with the group's number, or ``cancel_episode``.
        """
        episode = turn.episode
        with self.busy.running(), doing(State.COMPUTING if group_key >= 0 else State.EVALUATING):
            turn.stop = sampling.stop
            self.log_turn(turn, group_key)
            self.resume_turn(turn, group, max_tokens=max_tokens)
            while turn.end is None:
                if group.is_cancelled or episode.is_cancelled:
                    raise GroupCancelled
                number = episode.num_requests
                episode.num_requests += 1
                params = SamplingParams(
                    temperature=sampling.temperature,
                    top_k=sampling.top_k or self.all_kept,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    max_tokens=max_tokens - turn.trajectory.num_sampled,
                    logprobs=0,
                    seed=part_seed(seed, sample=episode.sample, part=number, agent=episode.agent),
                    # Texts are decoded once, from all parts; here only to look for texts that end a turn.
                    detokenize=bool(sampling.stop),
                    stop=list(sampling.stop),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    extra_args={
                        **request_arguments(group=group_key, sample=episode.sample, episode=episode.number),
                        PART_ARGUMENT: number,
                        **({} if turn.log_key is None else {TURN_ARGUMENT: turn.log_key}),
                    },
                )
                part = (await self.run_request(turn.trajectory.token_ids, params)).outputs[0]
                if group.is_cancelled or episode.is_cancelled:
                    raise GroupCancelled
                group.num_tokens += len(part.token_ids)
                self._num_generated_tokens += len(part.token_ids)
                self._end(turn, self.reader.grow(turn.trajectory, part, stop=sampling.stop))

    def log_turn(self, turn: EngineTurn, group_key: int) -> None:
        """Log a turn that begins, with what another engine has sampled of it."""
        if turn.log_key is None:
            turn.log_key = self._recorder.begin_turn(turn.begun(group_key), turn.restored)

    def resume_turn(self, turn: EngineTurn, group: RunningGroup, *, max_tokens: int) -> None:
        """Take up what another engine has sampled of a turn, if anything."""
        restored, turn.restored = turn.restored, None
        if restored is None or not restored.num_tokens:
            return
        end = self.reader.resume(turn.trajectory, restored, stop=turn.stop)
        group.num_tokens += turn.trajectory.num_sampled
        if end is None and turn.trajectory.num_sampled >= max_tokens:
            end = TurnEnd(finish_reason=FinishReason.LENGTH, has_end_token=False)
        self._end(turn, end)

    def _end(self, turn: EngineTurn, end: TurnEnd | None) -> None:
        """Note how a turn has ended; None: it goes on."""
        if end is None:
            return
        turn.end = end
        if turn.log_key is not None:
            self._recorder.end_turn(turn.ended(turn.log_key))

    async def run_request(self, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        """Make one request with one output, between two updates that do not admit any."""
        async with self._gate.inside():
            last = None
            prompt = tokens_input(prompt_ids)
            lora_request = None if self.adapter is None else self.adapter.request
            request_id = f"r{next(self._request_ids)}"
            async for output in self._llm.generate(prompt, params, request_id, lora_request=lora_request):
                last = output
        assert last is not None and last.finished and len(last.outputs) == 1
        return last

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Give up groups between two steps; those that have ended meanwhile are not touched."""
        self._groups.cancel(group_ids)
        await self._client.between_steps(
            lambda core: self._client.end_requests(core, self._groups.cancelled_requests(core))
        )

    async def cancel_episode(self, episode: EngineEpisode) -> None:
        """Give up one episode between two steps, for instance because its worker was lost."""
        episode.is_cancelled = True
        self._groups.cancel_episode(episode.number)
        await self._client.between_steps(
            lambda core: self._client.end_requests(core, self._groups.cancelled_requests(core))
        )

    async def update_weights(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """Put new weights in place, with what the configured interruption does to running sequences.

        ``prefetch`` fetches the weights, on the event loop; ``install`` puts them in place, on the
        engine's thread between two decode steps. Tokens of every later step carry ``version``. Where either
        raises, the engine goes on under the old version and the caller gets the exception. Updates run one
        after another.
        """
        return await self._updates.run(version, prefetch=prefetch, install=install)

    async def between_steps(self, function: Callable[[EngineCore], R]) -> R:
        """Run a function of vLLM's engine core between two steps, on the engine's thread."""
        return await self._client.between_steps(function)

    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Copies of every worker's parameters, experts unpacked (CPU engines only)."""
        return await self._client.between_steps(lambda core: core.collective_rpc("copy_parameters"))

    def check_alive(self) -> None:
        """Raise vLLM's EngineDeadError if the engine has died."""
        if self._llm.errored:
            raise self._llm.dead_error

    def stats(self) -> EngineStats:
        return EngineStats(
            num_generated_tokens=self._num_generated_tokens,
            busy_s=self.busy.total_s,
            steps_s=self._client.step_times.total_s,
            decode_steps=self._client.step_times.counts(),
            num_log_failures=self._recorder.num_failures,
            kv_block_tokens=self._llm.vllm_config.cache_config.block_size,
        )

    async def kv_usage(self) -> float:
        """Share of the KV cache that running requests hold, between two steps."""
        return await self._client.between_steps(lambda core: scheduler_of(core).kv_cache_manager.usage)

    def shutdown(self) -> None:
        self._llm.shutdown()


class NothingTimed(RuntimeError):
    """No step of the wanted kind was seen, for instance since the KV cache is too small."""


async def time_engine(
    engine: GeneratorEngine, timing: DecodeTiming | PrefillTiming, sampling: SamplingSection, *, seed: int
) -> float:
    """Time the engine with sequences of constant numbers and lengths, for a profile of the machine.

    Returns the seconds of one decode step, or of one prompt token; not those between two steps. Nothing else
    may run in the engine. Tokens are sampled as in a run, so that cut vocabularies, records and their copies
    cost what they cost there, and are thrown away.

    Raises:
        NothingTimed: no step had ``num_running`` sequences that all decoded.
    """
    rng = np.random.default_rng(seed)

    def prompts(num_prompts: int) -> list[list[int]]:
        length, text = timing.num_prompt_tokens, np.array(timing.text)
        begins = rng.integers(0, len(text), (num_prompts, 1))
        found = text[(begins + np.arange(length)) % len(text)]
        num_random = min(NUM_RANDOM, length)
        found[:, :num_random] = rng.integers(0, engine.vocab_size, (num_prompts, num_random))
        return found.tolist()

    if isinstance(timing, PrefillTiming):
        before_s = engine.stats().steps_s
        await _sample(engine, prompts(timing.num_prompts), sampling, num_tokens=1)
        num_tokens = timing.num_prompts * timing.num_prompt_tokens
        return (engine.stats().steps_s - before_s) / num_tokens
    load = timing.num_running.bit_length()
    for _ in range(MOST_TRIES):
        before = engine.stats().decode_steps.get(load, DecodeSteps())
        await _sample(engine, prompts(timing.num_running), sampling, num_tokens=timing.num_steps)
        after = engine.stats().decode_steps.get(load, DecodeSteps())
        num_steps = after.num_steps - before.num_steps
        if num_steps:
            return (after.took_s - before.took_s) / num_steps
    raise NothingTimed(
        f"of {timing.num_running} sequences with {timing.num_prompt_tokens} prompt tokens no step decoded "
        f"one token each, {MOST_TRIES} times: generator.kv_cache_gib or generator.max_num_seqs is too small "
        "for them, or other processes have the cores"
    )


async def _sample(
    engine: GeneratorEngine, prompts: Sequence[list[int]], sampling: SamplingSection, *, num_tokens: int
) -> None:
    """Sample exactly ``num_tokens`` tokens of every prompt."""

    async def one(index: int, prompt: list[int]) -> None:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or engine.all_kept,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=0,
            seed=index,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=request_arguments(sample=index, episode=engine.new_episode(index).number),
        )
        await engine.run_request(prompt, params)

    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
