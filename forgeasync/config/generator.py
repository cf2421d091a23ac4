"""The sections on sampling and on the generators: the distribution of responses, and the engines."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema import Count, CountOrZero, Gibibytes, Procs, Refusal, Section

MIN_TEMPERATURE = 0.01
"""Lowest temperature that vLLM 0.32 samples at (its ``_MAX_TEMP``): it raises lower ones to this."""


class SamplingSection(Section):
    """The distribution that responses are drawn from."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2.0)
    """Divisor of the logits. vLLM raises lower temperatures to 0.01, with which the trainer would disagree; 0
    is greedy, and a token without alternatives has no gradient. vLLM allows at most 2."""
    top_k: CountOrZero = 0
    """Number of most likely tokens that can be drawn; 0: all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=0.99)
    max_response_tokens: Count
    """Most tokens of a response; a longer one is cut and counted as truncated. With an environment: most
    tokens of each turn of the model."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings: a response ends with the token that completes one of them; its text is given without the
    stop string."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class GeneratorSection(Section):
    """The generators: vLLM engines behind a router, which are replaced when they are lost."""

    num_replicas: Procs = 1
    """Number of engines, each in its own Monarch proc."""
    num_spares: int = Field(default=0, ge=0, le=64)
    """Engines beyond ``num_replicas`` that have the newest weights and get no groups, until one of them takes
    the place of an engine that is lost. They need GPUs and memory as the others."""
    heartbeat_s: float = Field(default=8.0, ge=1.0, le=3600.0)
    """An engine's process that does not answer for so long is killed and replaced."""
    slow_factor: float | None = Field(default=None, ge=1.5, le=1000.0)
    """An engine whose decode steps take more than so many times as long as the median of the other engines',
    at a like number of sequences, gets no new groups after 15 s of this, and is replaced after 40 s. null:
    engines are not compared, as is right where they are not alike."""
    max_restarts: int = Field(default=5, gt=0, le=1000)
    """So many engines in a row that do not come to sample end the run."""
    max_lost_per_group: int = Field(default=3, gt=0, le=100)
    """A group that was on so many engines that were lost is given up (``dropped/lost``): its prompt may be
    what ends them."""
    tensor_parallel: Procs = 1
    """GPUs per engine."""
    expert_parallel: bool = False
    """Give each GPU of an engine whole experts instead of a slice of every expert."""
    dtype: Dtype = Dtype.FLOAT32
    max_num_seqs: int = Field(default=64, gt=0, le=65536)
    """Most sequences that an engine decodes at once."""
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=MAX_ROW_TOKENS)
    """Most tokens in one forward pass of the engine; chunked prefill splits longer prompts."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of each process of an engine, in GiB."""
    keep_in_flight: bool = True
    """Log the tokens of unfinished responses and episodes in the host's shared memory, so that another engine
    goes on with them if this one's process dies. Takes up to three times what they take as payloads."""
    compile: bool = False
    """Use torch.compile and (on GPUs) CUDA graphs; false: eager."""
    batch_invariant: bool = False
    """Make a response's tokens and log-probabilities independent, to the last bit, of what else is decoded. A
    synchronous run then has the same losses every time, interrupted or not. Costs some speed."""

    @property
    def num_engines(self) -> int:
        """Engines that a run starts, spares included."""
        return self.num_replicas + self.num_spares

    def find_problems(self) -> Iterator[Refusal]:
        """Find a forward pass that is too small for its sequences."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            remedy = (
                f"must be at least max_num_seqs = {self.max_num_seqs}: a forward pass takes one token of each"
            )
            yield "max_num_batched_tokens", f"{remedy} sequence"
