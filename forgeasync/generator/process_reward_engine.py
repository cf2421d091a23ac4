"""vLLM pooling engine with a process reward model, which scores the steps of a response at their tags.

Synchronous and single-threaded, for a separate process: the owner adds requests and calls ``step``. Requests
that are added between two steps are computed together.

Shape suffixes: J tags of one request, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm import EngineArgs, PoolingParams
from vllm.config import PoolerConfig
from vllm.inputs.engine import tokens_input
from vllm.outputs import PoolingRequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from forgeasync.config import ProcessRewardModel
from forgeasync.generator.workarounds.vllm_process import adapt_process, gpu_share
from forgeasync.models import BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTags:
    """Result of one request."""

    request_id: str
    values: tuple[float, ...]
    """Score from 0 to 1 at each tag of the request."""
    problem: str | None = None
    """Reason for missing values, or None."""


class ProcessRewardEngine:
    """Pooling engine of one process reward model."""

    def __init__(self, section: ProcessRewardModel, *, tag_id: int) -> None:
        """Load the model. Errors of vLLM are passed on."""
        adapt_process()
        self._tag_id = tag_id
        self._num_tags: dict[str, int] = {}
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=section.model_path,
                runner="pooling",
                # The engine receives token ids and returns no text.
                skip_tokenizer_init=True,
                dtype=section.dtype.value,
                max_model_len=section.max_context_length,
                max_num_seqs=section.max_num_seqs,
                max_num_batched_tokens=section.max_num_batched_tokens,
                kv_cache_memory_bytes=int(section.kv_cache_gib * 2**30),
                # Engines that share a GPU see as free only what the others have left.
                gpu_memory_utilization=gpu_share(
                    None if current_platform.is_cpu() else weights_and_cache_bytes(section)
                ),
                enforce_eager=True,
                async_scheduling=False,
                # A prefix from the cache is not computed and has no scores at its tags.
                enable_prefix_caching=False,
                pooler_config=PoolerConfig(
                    task="token_classify", tok_pooling_type="STEP", step_tag_id=tag_id
                ),
                disable_log_stats=True,
            )
        )

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self._llm.has_unfinished_requests()

    def add(self, request_id: str, ids: Sequence[int]) -> None:
        """Request the scores at the tags of a sequence of at most ``max_context_length`` tokens."""
        self._num_tags[request_id] = ids.count(self._tag_id)
        # Softmax or sigmoid is applied here: vLLM's choice depends on the model's config, and can be none for
        # one class.
        parameters = PoolingParams(task="token_classify", use_activation=False)
        self._llm.add_request(request_id, tokens_input(list(ids)), parameters)

    def step(self) -> list[ScoredTags]:
        """Run one forward pass and return the results that it completes."""
        answers = []
        for output in self._llm.step():
            assert isinstance(output, PoolingRequestOutput)
            if output.finished:
                answers.append(self._answer(output.request_id, output.outputs.data))
        return answers

    def _answer(self, request_id: str, logits_JC: torch.Tensor) -> ScoredTags:
        num_tags = self._num_tags.pop(request_id)
        if logits_JC.ndim != 2 or len(logits_JC) != num_tags or logits_JC.shape[1] not in (1, 2):
            shape = tuple(logits_JC.shape)
            return _without_values(request_id, f"gave scores of shape {shape} at {num_tags} step tags")
        if not bool(logits_JC.isfinite().all()):
            return _without_values(request_id, f"gave steps logits that are not finite: {logits_JC.tolist()}")
        logits_JC = logits_JC.double()
        # Two classes are wrong and right, in this order; a single class is right.
        values_J = logits_JC[:, 0].sigmoid() if logits_JC.shape[1] == 1 else logits_JC.softmax(-1)[:, 1]
        return ScoredTags(request_id=request_id, values=tuple(values_J.tolist()))


def weights_and_cache_bytes(section: ProcessRewardModel) -> int:
    """Return the bytes of GPU memory that an idle engine holds."""
    num_elements = 0
    for file in Path(section.model_path).glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            # get_slice reads only the header.
            num_elements += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    return num_elements * BYTES_PER_ELEMENT[section.dtype] + int(section.kv_cache_gib * 2**30)


def _without_values(request_id: str, problem: str) -> ScoredTags:
    return ScoredTags(request_id=request_id, values=(), problem=problem)
