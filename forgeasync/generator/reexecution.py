"""Samples recorded requests again, each token under the policy version that sampled it in the run.

An engine of the run swapped its weights between two decode steps, with requests in mid-sequence. Here, a
request runs under a version until it has as many tokens as it had at that swap. It then keeps its keys and
values, and waits for the next version. Batch-invariant kernels give a token the same bits in any batch, so
requests of several engines can run on one, and in another order.

``RecordedRequest`` is a request with what the run recorded of it. ``EngineReexecution`` runs the requests of
one version after another, and compares.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from forgeasync.config import SamplingSection
from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.reports import ReexecutedVersion, TokenDifference
from forgeasync.generator.turns import part_seed, sampling_params
from forgeasync.generator.updates import request_arguments
from forgeasync.generator.workarounds.inprocess_client import scheduler_of
from forgeasync.rollouts import (
    EVERY_HOST,
    Group,
    KeptTokens,
    PayloadReader,
    SampledTokens,
    StoredBranch,
    StoredRollout,
    all_kept,
    decode_rollout,
)

VERSIONS_ARGUMENT = "forgeasync_versions"
"""Sampling argument with pairs: a number of tokens, and the version that samples up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request of a run, with the record of its tokens."""

    draw_id: int
    """Draw of the request's group (``Group.draw_id``)."""
    episode: int
    agent: int
    branch: int
    start: int
    """Position in the branch's response of the first token that the request sampled."""
    seed: int
    prompt_ids: list[int]
    """All tokens before the sampled ones."""
    versions: tuple[tuple[int, int], ...]
    """Pairs of a number of sampled tokens and the version that sampled up to it, in order."""
    ids_N: np.ndarray
    logprobs_N: np.ndarray
    expert_ids_RMK: np.ndarray | None
    """Experts of the inputs that this request computed first, in ascending order; None if not recorded."""
    kept_tokens: KeptTokens | None

    @property
    def first_version(self) -> int:
        """Version of the weights that sampled the first token."""
        return self.versions[0][1]

    @property
    def last_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.versions[-1][1]


def recorded_requests(group: Group, *, seed: int) -> Iterator[RecordedRequest]:
    """Yield the requests that sampled a group whose arrays are in a file; ``seed`` is the group's."""
    reader = PayloadReader(EVERY_HOST)
    for rollout in group.rollouts:
        for number, branch in enumerate(rollout.branches):
            yield from _requests_of(reader, group, rollout, branch, number, seed=seed)


def _requests_of(
    reader: PayloadReader,
    group: Group,
    rollout: StoredRollout,
    branch: StoredBranch,
    number: int,
    *,
    seed: int,
) -> Iterator[RecordedRequest]:
    trace = decode_rollout(reader.read(branch.prompt), reader.read(branch.response))
    ids = [*trace.prompt_ids_P.tolist(), *trace.response_ids_T.tolist()]
    num_prompt = len(trace.prompt_ids_P)
    # The prompt of a later branch belongs to other branches, which compare it.
    first_row = 0 if number == 0 else num_prompt - 1
    for span in branch.request_spans:
        start, end = span.start, span.end
        rows = None
        if trace.routed_experts is not None:
            rows = trace.routed_experts.to_dense()[first_row : num_prompt + end - 1]
        kept = None if trace.kept_tokens is None else trace.kept_tokens.slice(start, end)
        yield RecordedRequest(
            draw_id=group.draw_id,
            episode=rollout.episode,
            agent=rollout.agent,
            branch=number,
            start=start,
            seed=_seed(seed, rollout, span.request),
            prompt_ids=ids[: num_prompt + start],
            versions=tuple(
                (min(one.end, end) - start, one.version)
                for one in branch.version_spans
                if one.start < end and one.end > start
            ),
            ids_N=trace.response_ids_T[start:end],
            logprobs_N=trace.logprobs_T[start:end],
            expert_ids_RMK=rows,
            kept_tokens=kept,
        )
        first_row = num_prompt + end - 1


def _seed(seed: int, rollout: StoredRollout, request: int) -> int:
    found = part_seed(seed, sample=rollout.episode, part=request, agent=rollout.agent)
    assert found is not None
    return found


def first_difference(request: RecordedRequest, sampled: SampledTokens | None) -> TokenDifference | None:
    """Compare the tokens of a request with the record, bit for bit; return the first difference, or None."""
    found: list[tuple[int, str, object, object]] = []
    num_found = 0 if sampled is None else min(len(sampled.ids_T), len(request.ids_N))
    if num_found < len(request.ids_N):
        found.append((num_found, "id", int(request.ids_N[num_found]), "none: the response has ended"))
    if sampled is not None:
        found += _differences(request, sampled.first(num_found), num_found)
    if not found:
        return None
    # Experts of a token's input come before its own values.
    position, what, recorded, got = min(found, key=lambda one: one[0])
    version = next(version for end, version in request.versions if position < end)
    return TokenDifference(
        draw_id=request.draw_id,
        episode=request.episode,
        agent=request.agent,
        branch=request.branch,
        position=request.start + position,
        version=version,
        what=what,
        recorded=str(recorded),
        found=str(got),
    )


def _differences(
    request: RecordedRequest, sampled: SampledTokens, num_found: int
) -> Iterator[tuple[int, str, object, object]]:
    """Yield the first difference of each kind: position, kind, recorded value, value found."""
    if request.expert_ids_RMK is not None:
        assert sampled.expert_ids_RMK is not None
        num_inputs = len(request.prompt_ids) + num_found - 1
        first = len(request.prompt_ids) + len(request.ids_N) - 1 - len(request.expert_ids_RMK)
        rows_RMK = np.sort(sampled.expert_ids_RMK, axis=-1)[first:num_inputs]
        wanted_RMK = request.expert_ids_RMK[: len(rows_RMK)]
        if len(wrong := np.argwhere((rows_RMK != wanted_RMK).any(-1))):
            row, layer = wrong[0].tolist()
            # A row belongs to an input; it decides about the token after it.
            position = max(first + row + 1 - len(request.prompt_ids), 0)
            what = f"experts of input {first + row} in MoE layer {layer}"
            yield position, what, wanted_RMK[row, layer].tolist(), rows_RMK[row, layer].tolist()
    logprobs_N = request.logprobs_N[:num_found]
    is_other_N = sampled.logprobs_T.view(np.int32) != logprobs_N.view(np.int32)
    for what, wrong_N, recorded_N, found_N in (
        ("id", sampled.ids_T != request.ids_N[:num_found], request.ids_N, sampled.ids_T),
        ("log-probability", is_other_N, request.logprobs_N, sampled.logprobs_T),
    ):
        if wrong_N.any():
            position = int(np.argmax(wrong_N))
            yield position, what, recorded_N[position], found_N[position]
    if sampled.kept_tokens is not None:
        kept = all_kept(len(request.ids_N)) if request.kept_tokens is None else request.kept_tokens
        for position in range(num_found):
            recorded, got = kept.row(position), sampled.kept_tokens.row(position)
            if not np.array_equal(recorded, got):
                yield position, "kept set", recorded.tolist(), got.tolist()
                return


class EngineReexecution:
    """Recorded requests that one engine samples again. Create it with ``await EngineReexecution.begin()``."""

    def __init__(self, engine: GeneratorEngine, sampling: SamplingSection) -> None:
        self._engine = engine
        self._sampling = sampling
        self._later: list[RecordedRequest] = []
        """Requests that begin under later versions."""
        self._open: dict[asyncio.Task[TokenDifference | None], RecordedRequest] = {}
        """Requests that have begun, by the task that samples and compares each."""
        self._stands_still = asyncio.Event()
        """Set by the engine's thread whenever no request may run."""

    @classmethod
    async def begin(cls, engine: GeneratorEngine, sampling: SamplingSection) -> "EngineReexecution":
        """Have the engine run each request under its recorded versions alone."""
        self = cls(engine, sampling)
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self._stands_still.set)

        await engine.between_steps(lambda core: _hold_requests(core, tell))
        return self

    async def run(self, version: int, requests: Sequence[RecordedRequest]) -> ReexecutedVersion:
        """Sample everything that ``version`` has sampled; the engine must have its weights.

        ``requests`` begin with this version or a later one. Returns once each request, also of earlier calls,
        has ended or waits for a later version.
        """
        self._later += requests
        for request in self._later:
            if request.first_version == version:
                self._open[asyncio.create_task(self._sample(request))] = request
        self._later = [one for one in self._later if one.first_version > version]
        while True:
            num_open = sum(not task.done() for task in self._open)
            num_later = sum(
                not task.done() and one.last_version > version for task, one in self._open.items()
            )
            if num_open == num_later and await self._engine.between_steps(
                lambda core, num=num_later: _all_wait(core, num)  # type: ignore[misc]  # bound now
            ):
                break
            await self._stands_still.wait()
            self._stands_still.clear()
            # Requests are on their way into the engine, or their results out of it.
            await asyncio.sleep(0)
        ended = [task for task in self._open if task.done()]
        of_ended = [self._open.pop(task) for task in ended]
        found = [one for task in ended if (one := task.result()) is not None]
        return ReexecutedVersion(
            num_tokens=sum(len(one.ids_N) for one in of_ended),
            num_waiting=len(self._open),
            differences=tuple(sorted(found, key=lambda one: (one.version, one.draw_id, one.position))),
        )

    async def _sample(self, request: RecordedRequest) -> TokenDifference | None:
        params = sampling_params(
            self._sampling,
            all_kept=self._engine.all_kept,
            max_tokens=len(request.ids_N),
            seed=request.seed,
            arguments={
                **request_arguments(episode=request.episode),
                VERSIONS_ARGUMENT: request.versions,
            },
        )
        (output,) = (await self._engine.run_request(request.prompt_ids, params)).outputs
        sampled = self._engine.reader.sampled(output, request=0) if output.token_ids else None
        return first_difference(request, sampled)


def _is_due(core: EngineCore, request: Request) -> bool:
    """Return whether the engine has the version that samples the request's next token."""
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    versions = request.sampling_params.extra_args[VERSIONS_ARGUMENT]
    due = next((version for end, version in versions if request.num_output_tokens < end), None)
    return str(due) == core.get_weight_version()


def _all_wait(core: EngineCore, num_requests: int) -> bool:
    """Return whether the engine has this number of requests, and none of them is due."""
    requests = scheduler_of(core).requests.values()
    return len(requests) == num_requests and not any(_is_due(core, one) for one in requests)


def _hold_requests(core: EngineCore, tell: Callable[[], None]) -> None:
    """Hide requests that are not due from the scheduler; call ``tell`` whenever none is due."""
    scheduler = scheduler_of(core)
    schedule = scheduler.schedule

    def schedule_due(*arguments: Any, **named: Any) -> Any:
        held = [one for one in scheduler.running if not _is_due(core, one)]
        held_back = [one for one in scheduler.waiting if not _is_due(core, one)]
        scheduler.running = [one for one in scheduler.running if _is_due(core, one)]
        scheduler.waiting.remove_requests(held_back)
        # Held requests keep their place in the engine.
        scheduler.max_num_active_reqs = scheduler.max_num_running_reqs - len(held)
        try:
            return schedule(*arguments, **named)
        finally:
            scheduler.running += held
            for one in held_back:
                scheduler.waiting.add_request(one)

    def has_requests() -> bool:
        if (
            any(_is_due(core, one) for one in scheduler.requests.values())
            or scheduler.has_finished_requests()
        ):
            return True
        tell()
        return False

    # vLLM 0.32 has no hook for this. The engine core calls both before each step.
    scheduler.schedule = schedule_due  # type: ignore[method-assign]
    scheduler.has_requests = has_requests  # type: ignore[method-assign]
