"""Sampling engines for tests, what can be asked of them in mid-run, and references for what they sample.

Imported by processes that load vLLM and by those that do not.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.rollouts import CaptureSpec, LoggedTurn, Rollout
from forgeasync.weights import NamedWeight, WeightLayout, lay_out, plan_copies

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.core import EngineCore

    from forgeasync.generator import GeneratorEngine, SwapReport

CONTEXT = 160
RECORDS = CaptureSpec(routing=True, kept_tokens=True)
ROUTING = CaptureSpec(routing=True, kept_tokens=False)
NO_RECORDS = CaptureSpec(routing=False, kept_tokens=False)


async def start_engine(
    folder: Path,
    generator: GeneratorSection,
    weights: WeightsSection | None = None,
    *,
    records: CaptureSpec = RECORDS,
    **options: Any,
) -> "GeneratorEngine":
    """An engine of this process; ``options`` are further ones of ``GeneratorEngine.start``."""
    from forgeasync.generator import GeneratorEngine

    return await GeneratorEngine.start(
        model_path=folder,
        generator=generator,
        max_context_length=CONTEXT,
        seed=0,
        records=records,
        weights=weights or WeightsSection(),
        **options,
    )


async def nothing_to_fetch() -> None:
    """The weights are near already."""


def installer(weights: Mapping[str, torch.Tensor]) -> "Callable[[EngineCore], None]":
    """Puts weights in place."""
    return lambda core: replace_all_weights(core, list(weights.items()))


async def update(
    engine: "GeneratorEngine", version: int, weights: Mapping[str, torch.Tensor]
) -> "SwapReport":
    return await engine.update_weights(version, prefetch=nothing_to_fetch, install=installer(weights))


async def sample_all(
    engine: "GeneratorEngine", prompts: Sequence[np.ndarray], sampling: SamplingSection, *, num_samples: int
) -> list[Rollout]:
    """Groups of all prompts at once."""
    groups = await asyncio.gather(
        *(
            engine.generate(prompt_ids_P=prompt, num_samples=num_samples, sampling=sampling)
            for prompt in prompts
        )
    )
    return [rollout for group in groups for rollout in group]


async def ask(engine: "GeneratorEngine", question: "Callable[[EngineCore], bool]") -> bool:
    return await engine._client.between_steps(question)


def num_output_tokens(core: "EngineCore") -> int:
    """Tokens of all requests that have not finished."""
    return sum(request.num_output_tokens for request in core.scheduler.requests.values())


async def let_decode(engine: "GeneratorEngine", num_tokens: int) -> None:
    """Decode until a request, running now or started since, has that many more tokens.

    The engine takes only the steps that this function asks for, one at a time. An engine that decodes freely
    can end short requests before a busy event loop looks at them, and then nobody would ever see the tokens.
    """
    client = engine._client
    before: dict[str, int] = {}

    def tokens(core: "EngineCore") -> dict[str, int]:
        return {one: request.num_output_tokens for one, request in core.scheduler.requests.items()}

    def pause(core: "EngineCore") -> None:
        client._stands_still = True
        before.update(tokens(core))

    def step(core: "EngineCore") -> bool:
        if core.scheduler.has_requests():
            client._step()
        return any(now >= before.get(one, 0) + num_tokens for one, now in tokens(core).items())

    def resume(_: "EngineCore") -> None:
        client._stands_still = False

    await client.between_steps(pause)
    while not await client.between_steps(step):
        # Requests are added by tasks that need some turns of the event loop.
        await asyncio.sleep(0)
    await client.between_steps(resume)


def flat_logprobs(token_ids: Sequence[int], logprobs: Sequence[float]) -> "FlatLogprobs":
    """What an engine hands out of sampled tokens."""
    from vllm.logprobs import FlatLogprobs, Logprob

    found = FlatLogprobs()
    for token, logprob in zip(token_ids, logprobs, strict=True):
        found.append({token: Logprob(logprob)})
    return found


def schedule_asynchronously() -> None:
    """Have engines of this process schedule a step while the one before it is in flight, as on GPUs.

    vLLM's platform for CPUs turns that off. Its CPU runner computes a step when it is launched, and returns
    what was sampled at once.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    build = AsyncLLM.from_vllm_config

    def from_vllm_config(vllm_config: "VllmConfig", **options: Any) -> AsyncLLM:
        vllm_config.scheduler_config.async_scheduling = True
        llm = build(vllm_config, **options)
        assert llm.engine_core._core.batch_queue is not None
        return llm

    AsyncLLM.from_vllm_config = from_vllm_config
    GPUModelRunner.use_async_scheduling = property(lambda _: False, lambda *_: None)


TIE = 3e-5
"""Difference of two gate logits that rounding can bridge: float32 is up to 7e-6 from exact values here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What transformers makes of a rollout's inputs, which are all its tokens but the last."""

    logits_SV: torch.Tensor
    router_logits_SME: np.ndarray
    is_certain_S: np.ndarray
    """False where two experts of an earlier input, which has no record, are equal but for rounding."""


@contextmanager
def chosen_experts(model: torch.nn.Module, ids_SMK: np.ndarray, *, first: int) -> Iterator[None]:
    """Have transformers' Qwen3-MoE use the given experts for the inputs from ``first`` on.

    Two experts can be equally good but for rounding. The engine may then take the other one, which changes
    everything that follows. Whether the given experts have the largest gate logits is for ``assert_routing``.
    """

    def replace(layer: int, gate: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, ...]]:
        def hook(_: torch.nn.Module, args: object, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits_SE, scores_SK, chosen_SK = out
            chosen_SK = chosen_SK.clone()
            chosen_SK[first:] = torch.from_numpy(ids_SMK[:, layer].astype(np.int64))
            scores_SK = logits_SE.softmax(-1, dtype=torch.float32).gather(-1, chosen_SK)
            assert gate.norm_topk_prob
            return logits_SE, scores_SK / scores_SK.sum(-1, keepdim=True), chosen_SK

        return hook

    with ExitStack() as stack:
        gates = [one for name, one in model.named_modules() if name.endswith(".mlp.gate")]
        for layer, gate in enumerate(gates):
            stack.callback(gate.register_forward_hook(replace(layer, gate)).remove)
        yield


@torch.no_grad()
def expected(models: Mapping[int, torch.nn.Module], rollout: Rollout, *, recomputed: bool) -> Expected:
    """Each input under the weights that first computed it, by the rollout's version spans.

    It attends to what was before it, as computed by older weights at the time or, if ``recomputed``, all by
    its own. It takes the experts that the rollout recorded.
    """
    recorded_SMK = None if rollout.routed_experts is None else rollout.routed_experts.to_dense()
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids_P, rollout.response_ids_T])).long()[None]
    cache = DynamicCache()
    logits, routers, certain = [], [], []
    for span in rollout.version_spans:
        # The forward pass that sampled token i had the token before it as its last input.
        last = len(rollout.prompt_ids_P) - 1 + span.end
        first = last - (span.end - span.start) if span.start else 0
        skipped = first if recomputed else 0
        with ExitStack() as stack:
            if recorded_SMK is not None:
                stack.enter_context(
                    chosen_experts(models[span.version], recorded_SMK[first:last], first=skipped)
                )
            if recomputed:
                out = models[span.version](ids[:, :last], output_router_logits=True)
            else:
                out = models[span.version](
                    ids[:, first:last], past_key_values=cache, use_cache=True, output_router_logits=True
                )
        logits.append(out.logits[0, skipped:])
        router_logits_SME = torch.stack(out.router_logits, 1)
        routers.append(router_logits_SME[skipped:])
        top_SMK = router_logits_SME[:skipped].topk(models[span.version].config.num_experts_per_tok + 1).values
        is_tied = bool((top_SMK[..., -2] - top_SMK[..., -1] < TIE).any())
        certain.append(np.full(last - first, not is_tied))
    return Expected(
        logits_SV=torch.cat(logits),
        router_logits_SME=torch.cat(routers).numpy(),
        is_certain_S=np.concatenate(certain),
    )


def assert_logprobs(found: Rollout, reference: Expected, sampling: SamplingSection) -> None:
    """Log-probabilities are those of the kept set's distribution, and kept sets what could be drawn."""
    kept = found.kept_tokens
    assert kept is not None and kept.num_tokens == found.num_response_tokens
    for index, token in enumerate(found.response_ids_T.tolist()):
        place = len(found.prompt_ids_P) - 1 + index
        if not reference.is_certain_S[place]:
            continue
        row_V = reference.logits_SV[place].double() / sampling.temperature
        surely, maybe = kept_by_definition(row_V, sampling)
        ids = kept.row(index).tolist() or list(range(len(row_V)))
        assert surely <= set(ids) <= maybe
        wanted = float(torch.log_softmax(row_V[ids], 0)[ids.index(token)])
        assert abs(float(found.logprobs_T[index]) - wanted) < 2e-4, (index, found.version_spans)


def kept_by_definition(scaled_logits_V: torch.Tensor, sampling: SamplingSection) -> tuple[set[int], set[int]]:
    """Token ids that surely belong to the kept set, and those that may (a rounding error from its edge).

    The logits are divided by the temperature already.
    """
    probabilities = torch.softmax(scaled_logits_V.double(), 0)
    values, order = probabilities.sort(descending=True)
    num_left = sampling.top_k or len(order)
    values, order = values[:num_left], order[:num_left]
    values = values / values.sum()
    before = values.cumsum(0) - values
    largest = probabilities.max()

    def ids(margin: float) -> set[int]:
        is_kept = (before < sampling.top_p + margin) & (
            values * probabilities[order].sum() >= sampling.min_p * largest - margin
        )
        return set(order[is_kept].tolist())

    return ids(-1e-5), ids(1e-5)


def assert_routing(found: Rollout, reference: Expected) -> None:
    """Every input has a record, and it holds the experts with the largest gate logits."""
    record = found.routed_experts
    assert record is not None
    num_inputs = len(reference.logits_SV)
    assert record.is_recorded_S.tolist() == [True] * num_inputs + [False]
    ids_SMK = record.expert_ids_RMK.astype(np.int64)
    chosen = np.take_along_axis(reference.router_logits_SME, ids_SMK, -1).min(-1)
    kth = np.sort(reference.router_logits_SME, -1)[..., -ids_SMK.shape[-1]]
    # Equal but for a tie within rounding.
    assert (chosen > kth - 1e-3).all()


def revealing_weights(folder: Path, token: int) -> dict[str, torch.Tensor]:
    """Weights of the same shapes that make one token certain everywhere."""
    weights = {name: torch.zeros_like(t) for name, t in load_file(folder / "model.safetensors").items()}
    # All attention and expert outputs are zero: what reaches the head is the embedding, normalized to ones.
    weights["model.embed_tokens.weight"].fill_(1.0)
    weights["model.norm.weight"].fill_(1.0)
    weights["lm_head.weight"][token] = 1.0
    return weights


def assert_begins_with(rollout: Rollout, turn: LoggedTurn, *, length: int | None = None) -> None:
    """A response begins with a turn that was logged, bit for bit, and has nothing else if that had ended.

    ``length``: of the response's first turn, where it has several.
    """
    assert rollout.prompt_ids_P.tolist() == turn.begun.given_ids.tolist()
    num_tokens = turn.num_tokens
    if not num_tokens:
        return
    tokens = turn.tokens()
    assert rollout.response_ids_T[:num_tokens].tolist() == tokens.ids_T.tolist()
    assert rollout.logprobs_T[:num_tokens].tobytes() == tokens.logprobs_T.tobytes()
    versions = [span.version for span in rollout.version_spans for _ in range(span.start, span.end)]
    assert versions[:num_tokens] == turn.batch.versions_N.tolist()
    for token in range(num_tokens):
        assert rollout.kept_tokens.row(token).tolist() == tokens.kept_tokens.row(token).tolist()
    old_RMK = np.sort(tokens.expert_ids_RMK, axis=-1)
    assert len(old_RMK) == len(turn.begun.given_ids) + num_tokens - 1
    assert rollout.routed_experts.expert_ids_RMK[: len(old_RMK)].tolist() == old_RMK.tolist()
    if turn.ended is not None:
        assert num_tokens == (rollout.num_response_tokens if length is None else length)
    if turn.ended is not None and length is None:
        assert rollout.finish_reason is turn.ended.finish_reason


def replace_all_weights(core: "EngineCore", weights: list[tuple[str, torch.Tensor]]) -> None:
    """Replace every weight of a one-worker CPU engine; float32 tensors under their Hugging Face names."""
    named = [NamedWeight(names=(name,), tensor=tensor) for name, tensor in weights]
    rank = lay_out(named, range(len(named)), rank=0, host_id="h", itemsize=4)
    image = torch.empty(rank.num_bytes // 4)
    for piece, (_, tensor) in zip(rank.pieces, weights, strict=True):
        image[piece.offset // 4 : piece.offset // 4 + tensor.numel()] = tensor.flatten()
    layout = WeightLayout(dtype=torch.float32, ranks=(rank,))
    worker = core.model_executor.driver_worker.worker
    answer = worker.trace_weights(layout.shapes, layout.dtype)
    worker._weights.plan(plan_copies(layout, answer.trace.regions))
    worker._weights.stage([image])
    worker._weights.swap()


VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def assert_engine_holds(
    workers: list[dict[str, torch.Tensor]], exported: dict[str, torch.Tensor], *, atol: float = 0.0
) -> None:
    """Every parameter of every tensor-parallel worker is its part of ``exported``, by default bit for bit."""
    for rank, parameters in enumerate(workers):
        remaining = dict(parameters)
        for name, expected in _expected(dict(exported), rank, len(workers)).items():
            found = remaining.pop(name)
            if name in VOCABULARY:
                # The engine pads its vocabulary with zeros before it splits it.
                missing = len(workers) * found.shape[0] - expected.shape[0]
                whole = torch.nn.functional.pad(expected, (0, 0, 0, missing))
                expected = whole.chunk(len(workers))[rank]
            difference = float((found - expected).abs().max())
            assert difference <= atol, f"{name} of worker {rank} differs by {difference}"
        assert not remaining, f"parameters that nothing was compared with: {sorted(remaining)}"


def _expected(exported: dict[str, torch.Tensor], rank: int, num_workers: int) -> dict[str, torch.Tensor]:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=-2)[rank]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=-1)[rank]

    expected: dict[str, torch.Tensor] = {}
    num_layers = 1 + max(int(name.split(".")[2]) for name in exported if name.startswith("model.layers."))
    for layer in (f"model.layers.{i}" for i in range(num_layers)):
        attention = f"{layer}.self_attn"
        qkv = [rows(exported.pop(f"{attention}.{x}_proj.weight")) for x in "qkv"]
        expected[f"{attention}.qkv_proj.weight"] = torch.cat(qkv)
        expected[f"{attention}.o_proj.weight"] = columns(exported.pop(f"{attention}.o_proj.weight"))
        experts = {"gate": [], "up": [], "down": []}
        num_experts = exported[f"{layer}.mlp.gate.weight"].shape[0]
        for name, tensors in experts.items():
            prefix = f"{layer}.mlp.experts"
            tensors += [exported.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(num_experts)]
        gate, up, down = (torch.stack(experts[name]) for name in ("gate", "up", "down"))
        routed = f"{layer}.mlp.experts.routed_experts"
        expected[f"{routed}.w13_weight"] = torch.cat([rows(gate), rows(up)], dim=1)
        expected[f"{routed}.w2_weight"] = columns(down)
    return expected | exported
