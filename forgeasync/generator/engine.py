"""vLLM engine that samples groups of rollouts and installs new weights between two decode steps.

Plain asyncio without Monarch. The generator actor is a thin shell around ``GeneratorEngine``.
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
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from forgeasync.config import Colocated, GeneratorSection, SamplingSection, WeightsSection
from forgeasync.generator.in_flight_recorder import PART_ARGUMENT, TURN_ARGUMENT, InFlightRecorder
from forgeasync.generator.reports import BusyClock, EngineStats, GroupCancelled, SwapReport
from forgeasync.generator.turns import (
    EngineEpisode,
    EngineTurn,
    SequenceReader,
    TurnEnd,
    check_continued,
    part_seed,
    sampling_params,
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
    attend_invariantly,
    compute_batch_invariantly,
    compute_qwen3_5,
    expand_latents,
    gpu_share,
    rotate_in_torch,
    text_overrides,
    unquantized,
)
from forgeasync.models import load_tokenizer
from forgeasync.observability import State, doing
from forgeasync.rollouts import CaptureSpec, FinishReason, LoggedTurn, OperatorTrace, Rollout

R = TypeVar("R")

CPU_WORKER = "forgeasync.generator.workarounds.cpu_worker.UpdatableCPUWorker"

GPU_WORKER_EXTENSION = "forgeasync.generator.gpu_worker.UpdatableGPUWorker"
"""Class that vLLM adds to its GPU workers, for weight updates."""


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
    """Return vLLM's arguments for an engine.

    Raises:
        ValueError: See ``gpu_share``.
    """
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=generator.dtype.value,
        max_model_len=max_context_length,
        hf_overrides=unquantized(model_path) or text_overrides(model_path),
        # For Qwen3.5. vLLM prefers FlashInfer's kernels on Hopper, which are compiled when an engine starts.
        additional_config={"gdn_prefill_backend": "triton"},
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        tensor_parallel_size=generator.tensor_parallel,
        enable_expert_parallel=generator.expert_parallel,
        worker_cls=CPU_WORKER if is_cpu else "auto",
        worker_extension_cls="" if is_cpu else GPU_WORKER_EXTENSION,
        enable_sleep_mode=generator.colocated is Colocated.SLEEP and not is_cpu,
        kv_cache_memory_bytes=int(generator.kv_cache_gib * 2**30),
        gpu_memory_utilization=gpu_share(gpu_bytes),
        enforce_eager=not generator.compile,
        # Log-probabilities of the distribution that is sampled: after temperature, top-k, top-p and min-p.
        logprobs_mode="processed_logprobs",
        max_logprobs=num_scored_ids,
        # A CPU computes a step within the call that launches it, so nothing would run beside it.
        async_scheduling=not is_cpu,
        seed=seed,
        enable_return_routed_experts=records.routing and not is_cpu,
        return_sampling_mask=records.kept_tokens and not is_cpu,
        enable_lora=adapters is not None,
        max_lora_rank=16 if adapters is None else engine_rank(adapters.lora.rank),
        lora_target_modules=None if adapters is None else engine_modules(adapters),
    )


class GeneratorEngine:
    """One vLLM engine. Create it with ``await GeneratorEngine.start(...)`` inside an event loop."""

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
        # vLLM records kept sets only if top_k is set; top_k = vocabulary size keeps all tokens.
        self.all_kept = self.vocab_size if records.kept_tokens else 0
        """``top_k`` of requests whose sampling section does not set it."""
        self._recorder = recorder
        self.reader = SequenceReader(
            tokenizer=load_tokenizer(model.model),  # type: ignore[arg-type]  # vLLM takes those of transformers
            vocab_size=self.vocab_size,
            num_experts=model.get_num_experts(),
            num_dense_layers=records.num_dense_layers,
        )
        """Converts the engine's outputs to trajectories."""
        self._gate = AdmissionGate()
        self._groups = Groups()
        self._updates = WeightUpdates(
            client,
            self._groups,
            self._gate,
            interruption=weights.interruption,
            kv_cache=weights.kv_cache,
            # States of a prompt's first part would not show in the versions of the sampled tokens.
            keeps_prompts_whole=records.execution or model.is_hybrid,
        )
        self.adapter: ServedAdapter | None = None
        """Adapter that serves all requests; None if whole weights are published."""
        self._request_ids = itertools.count()
        self._episode_numbers = itertools.count()
        self._num_generated_tokens = 0
        self.busy = BusyClock()
        """Clock of the time with at least one request in flight."""

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
        """Start an engine with the weights of a Hugging Face folder as policy version 0.

        Args:
            model_path: The Hugging Face folder.
            generator: The config's ``generator`` section.
            max_context_length: Maximum number of tokens of prompt and response.
            seed: Seed of sampling for requests without a seed.
            records: What the engine records besides tokens and log-probabilities.
            weights: The config's ``weights`` section.
            adapters: Setup of the LoRA adapter that vLLM serves; None if whole weights are published.
            in_flight: Folder for the log of tokens in flight of groups with an id, which is created; None: no
                log.
            num_scored_ids: Maximum number of ids per position that ``forgeasync.generator.token_scores``
                requests.
            gpu_bytes: Bytes that must be free on each GPU; None: vLLM's default share (see ``gpu_share``).
        """
        is_cpu = current_platform.is_cpu()
        adapt_process()
        if generator.batch_invariant:
            compute_batch_invariantly(is_cpu=is_cpu)
        if is_cpu:
            expand_latents()
        if text_overrides(model_path):
            compute_qwen3_5(is_cpu=is_cpu)
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
        # In a thread, like loading the model (start_llm), so that the event loop stays responsive.
        vllm_config = await asyncio.to_thread(args.create_engine_config, UsageContext.ENGINE_CONTEXT)
        if is_cpu:
            # Imports the CPU build's model runner, which other builds may lack.
            from forgeasync.generator.workarounds.cpu_model_runner import request_records

            rotate_in_torch(vllm_config)
            request_records(vllm_config, routing=records.routing, kept_tokens=records.kept_tokens)
        elif generator.batch_invariant:
            attend_invariantly(vllm_config)
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

        With a ``group_id``, the group can be cancelled, updates report its progress, and its tokens are
        logged until ``forget_group``.

        Args:
            prompt_ids_P: Token ids of the prompt, int32.
            num_samples: Number of responses.
            sampling: The config's ``sampling`` section.
            seed: Seed of the group. None: responses are not reproducible.
            group_id: Id of the group; None: a group that is not trained on.
            continued: Turns of the group that another engine has sampled: unfinished ones are continued,
                finished ones are returned as they are.
            on_finished: Callback with the index of a finished response within its group, and the response.

        Raises:
            GroupCancelled: ``cancel`` was called with the group's id.
            ValueError: A group with this id is in flight, or ``continued`` belongs to another group.
        """
        check_continued(continued, prompt_ids_P, num_samples, sampling)
        group = self.open_group(group_id)
        turns = [self.first_turn(self.new_episode(index)) for index in range(num_samples)]
        for turn in turns:
            turn.trajectory.give(prompt_ids_P)
        for restored in continued:
            turn = turns[restored.begun.episode.index]
            turn.restored = restored
            turn.episode.num_requests = restored.num_parts

        async def sample(index: int, turn: EngineTurn) -> Rollout:
            await self.sample_turn(
                turn, group, sampling=sampling, max_tokens=sampling.max_response_tokens, seed=seed
            )
            (rollout,) = self.reader.rollouts([turn])
            if on_finished is not None:
                on_finished(index, rollout)
            return rollout

        tasks = [asyncio.create_task(sample(index, turn)) for index, turn in enumerate(turns)]
        try:
            return tuple(await asyncio.gather(*tasks))
        except BaseException:
            self.forget_group(group.key)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.close_group(group)

    def new_episode(self, sample: int, *, agent: int = 0, attempt: int = 0) -> EngineEpisode:
        """Return an episode without turns; ``sample`` is its index within its group."""
        return EngineEpisode(number=next(self._episode_numbers), sample=sample, agent=agent, attempt=attempt)

    def first_turn(self, episode: EngineEpisode) -> EngineTurn:
        """Return a turn without tokens that starts a trajectory."""
        return EngineTurn(episode=episode, trajectory=self.reader.new_trajectory())

    def open_group(self, group_id: int | None) -> RunningGroup:
        """Open a group that is sampled turn by turn until ``close_group``.

        Updates report its progress unless ``group_id`` is None.

        Raises:
            ValueError: A group with this id is in flight.
        """
        group = self._groups.open(group_id)
        if group.key >= 0:
            self._recorder.open_group(group.key)
        return group

    def close_group(self, group: RunningGroup) -> None:
        """Close a group; no further turn of it is sampled. Its tokens stay logged until ``forget_group``."""
        self._groups.close(group)

    def forget_group(self, group_key: int) -> None:
        """Drop a group from the log, because no other engine will continue it."""
        self._recorder.forget_group(group_key)

    def forget_turns(self, turns: Sequence[EngineTurn]) -> None:
        """Drop turns from the log, because no other engine will continue them."""
        self._recorder.forget_turns([turn.log_key for turn in turns if turn.log_key is not None])

    async def sample_turn(
        self,
        turn: EngineTurn,
        group: RunningGroup,
        *,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
    ) -> None:
        """Sample one turn of at most ``max_tokens`` tokens.

        Makes one request, plus one for each time a swap ends the request before the turn is complete.

        Raises:
            GroupCancelled: The group or the episode was cancelled.
        """
        episode = turn.episode
        with self.busy.running(), doing(State.COMPUTING if group.key >= 0 else State.EVALUATING):
            turn.stop = sampling.stop
            self.log_turn(turn, group)
            self.resume_turn(turn, group, max_tokens=max_tokens)
            while turn.end is None:
                if group.is_cancelled or episode.is_cancelled:
                    raise GroupCancelled
                number = episode.num_requests
                episode.num_requests += 1
                params = sampling_params(
                    sampling,
                    all_kept=self.all_kept,
                    max_tokens=max_tokens - turn.trajectory.num_sampled,
                    seed=part_seed(seed, sample=episode.sample, part=number, agent=episode.agent),
                    arguments={
                        **request_arguments(group=group.key, sample=episode.sample, episode=episode.number),
                        PART_ARGUMENT: number,
                        **({} if turn.log_key is None else {TURN_ARGUMENT: turn.log_key}),
                    },
                )
                part = (await self.run_request(turn.trajectory.token_ids, params)).outputs[0]
                if group.is_cancelled or episode.is_cancelled:
                    raise GroupCancelled
                group.num_tokens += len(part.token_ids)
                self._num_generated_tokens += len(part.token_ids)
                self._end(turn, self.reader.grow(turn.trajectory, part, request=number, stop=sampling.stop))

    def log_turn(self, turn: EngineTurn, group: RunningGroup) -> None:
        """Log the beginning of a turn, with the tokens that another engine has sampled of it."""
        if turn.log_key is None:
            turn.log_key = self._recorder.begin_turn(turn.begun(group.key), turn.restored)

    def resume_turn(self, turn: EngineTurn, group: RunningGroup, *, max_tokens: int) -> None:
        """Append the tokens that another engine has sampled of a turn, if any."""
        restored, turn.restored = turn.restored, None
        if restored is None or not restored.num_tokens:
            return
        end = self.reader.resume(turn.trajectory, restored, stop=turn.stop)
        group.num_tokens += turn.trajectory.num_sampled
        if end is None and turn.trajectory.num_sampled >= max_tokens:
            end = TurnEnd(finish_reason=FinishReason.LENGTH, has_end_token=False)
        self._end(turn, end)

    def _end(self, turn: EngineTurn, end: TurnEnd | None) -> None:
        """Record how a turn ended; None: it continues."""
        if end is None:
            return
        turn.end = end
        if turn.log_key is not None:
            self._recorder.end_turn(turn.ended(turn.log_key))

    async def run_request(self, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        """Run one request with one output; waits while an update does not admit requests."""
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
        """Cancel groups between two steps; groups that have ended meanwhile are ignored."""
        self._groups.cancel(group_ids)
        await self._end_cancelled()

    async def cancel_episode(self, episode: EngineEpisode) -> None:
        """Cancel one episode between two steps, for example because its environment worker died."""
        episode.is_cancelled = True
        self._groups.cancel_episode(episode.number)
        await self._end_cancelled()

    async def _end_cancelled(self) -> None:
        await self._client.between_steps(
            lambda core: self._client.end_requests(core, self._groups.cancelled_requests(core)),
            needs_drain=False,
        )

    async def update_weights(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """Install new weights; the configured interruption decides what happens to running sequences.

        Tokens of all later steps have the policy version ``version``. If either function raises, the engine
        continues with the old version and the exception reaches the caller. Concurrent calls run one after
        another.

        Args:
            prefetch: Fetches the weights, on the event loop.
            install: Installs them, on the engine's thread between two decode steps.
        """
        return await self._updates.run(version, prefetch=prefetch, install=install)

    async def between_steps(self, function: Callable[[EngineCore], R], *, needs_drain: bool = True) -> R:
        """Run a function of vLLM's engine core on the engine's thread, between two steps.

        Without ``needs_drain`` a step may be in flight on a GPU.
        """
        return await self._client.between_steps(function, needs_drain=needs_drain)

    async def first_different_operator(self, file: Path) -> str:
        """Compute the last token of a trace (``OperatorTrace``) alone; name the first operator that differs.

        Running requests end as with ``abort_and_resume``.

        Raises:
            ValueError: The engine has another version than the trace.
        """
        trace = await asyncio.to_thread(OperatorTrace.read, file)

        def prefill(core: EngineCore) -> str:
            if (version := core.get_weight_version()) != str(trace.version):
                raise ValueError(f"the engine has version {version}; must be {trace.version}")
            self._client.end_requests(core, scheduler_of(core).requests)
            return trace.compare(_operators(core, trace))

        return await self._client.between_steps(prefill)

    async def sleep(self) -> None:
        """Take the weights and the KV cache off the GPU until ``wake``; sequences and updates wait."""
        await self._client.fall_asleep()

    async def wake(self) -> None:
        """Go on after ``sleep``: running sequences compute their KV cache again."""
        await self._client.wake()

    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of every worker's parameters, with experts unpacked (CPU engines only)."""
        return await self._client.between_steps(lambda core: core.collective_rpc("copy_parameters"))

    def check_alive(self) -> None:
        """Raise vLLM's EngineDeadError if the engine has died."""
        if self._llm.errored:
            raise self._llm.dead_error

    def stats(self) -> EngineStats:
        """Return the number of sampled tokens, the busy time, and failures to log tokens."""
        return EngineStats(
            num_generated_tokens=self._num_generated_tokens,
            busy_s=self.busy.total_s,
            num_log_failures=self._recorder.num_failures,
        )

    def shutdown(self) -> None:
        """End the engine and its worker processes."""
        self._llm.shutdown()


def _operators(core: EngineCore, trace: OperatorTrace) -> dict[str, np.ndarray]:
    """Prefill the tokens of a trace (engine thread, without other requests); return the engine's vectors."""
    core.collective_rpc("watch_operators", args=(list(trace.vectors),))
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    hasher = core.request_block_hasher
    core.add_request(Request("operators", trace.token_ids_S.tolist(), params, None, block_hasher=hasher))
    try:
        # Also the step that forgets the finished request.
        while scheduler_of(core).has_requests():
            core.step_fn()
    finally:
        seen: list[dict[str, np.ndarray]] = core.collective_rpc("operators_seen")
    return seen[0]
