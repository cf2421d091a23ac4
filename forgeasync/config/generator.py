"""The distribution that responses are drawn from, and the engines that draw them."""

from typing import Annotated

from pydantic import Field

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema.section import Count, CountOrZero, Gibibytes, Procs, Section

MIN_TEMPERATURE = 0.01
"""``_MAX_TEMP`` of vLLM 0.32, which raises lower temperatures to it."""


class SamplingSection(Section):
    """The distribution that responses are drawn from."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2.0)
    """vLLM samples lower ones at 0.01, while the trainer would divide by what is written here; 0 is greedy: a
    token without alternatives has no gradient. vLLM takes no more than 2."""
    top_k: CountOrZero = 0
    """0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=0.99)
    max_response_tokens: Count
    """A response is cut here and counted as truncated; with an environment, each turn of the model."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A response ends with the token that completes one of these texts, which its own text leaves out."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether some tokens cannot be drawn at all."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class GeneratorSection(Section):
    """The generator mesh: vLLM engines behind a router."""

    num_replicas: Procs = 1
    """Engines; each lives in its own Monarch proc."""
    tensor_parallel: Procs = 1
    """GPUs per engine."""
    expert_parallel: bool = False
    """An engine's GPUs hold different experts, instead of a slice of every expert each."""
    dtype: Dtype = Dtype.FLOAT32
    max_num_seqs: int = Field(default=64, gt=0, le=65536)
    """Sequences an engine decodes at once."""
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=MAX_ROW_TOKENS)
    """Tokens in one forward pass of the engine (chunked prefill splits longer prompts)."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of one engine process."""
    compile: bool = False
    """torch.compile and (on GPUs) CUDA graphs; off means eager."""
    batch_invariant: bool = False
    """A response's tokens and log-probabilities do not depend on what else is decoded, to the last bit, at
    some cost in speed: a synchronous run then has the same losses every time, interrupted or not."""
