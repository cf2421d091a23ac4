"""Sections for sampling and generators: the distribution of responses, and the vLLM engines."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema import Count, CountOrZero, Gibibytes, Procs, Refusal, Section

MIN_TEMPERATURE = 0.01
"""Minimum temperature of vLLM 0.32 (its ``_MAX_TEMP``), which raises lower ones to this value."""


class SamplingSection(Section):
    """Distribution from which responses are sampled."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2.0)
    """Divisor of the logits. vLLM raises temperatures below 0.01 to 0.01, which the trainer would not match.
    0 would be greedy: a token without alternatives has no gradient. vLLM allows at most 2."""
    top_k: CountOrZero = 0
    """Number of most likely tokens that can be sampled; 0: all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Smallest total probability of the most likely tokens that can be sampled; 1: all."""
    min_p: float = Field(default=0.0, ge=0.0, le=0.99)
    """Minimum probability of a token that can be sampled, relative to the most likely one; 0: all."""
    max_response_tokens: Count
    """Maximum number of tokens of a response; a longer one is cut and counted as truncated. With an
    environment: maximum number of tokens of each turn of the model."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings: a response ends with the token that completes one of them; its text excludes the stop
    string."""

    @property
    def cuts_vocabulary(self) -> bool:
        """True if top-k, top-p or min-p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Colocated(StrEnum):
    """What an engine does while a trainer on the same GPU makes a step."""

    SHARE = "share"
    """It continues to decode. Both roles must fit on the GPU at once."""
    SLEEP = "sleep"
    """It pauses, with its weights in host memory and without a KV cache. Afterwards running sequences
    compute their KV cache again."""


class GeneratorSection(Section):
    """Settings of the generators: vLLM engines behind a router, which are replaced when they are lost."""

    num_replicas: Procs = 1
    """Number of engines, each in its own Monarch process."""
    heartbeat_s: float = Field(default=8.0, ge=1.0, le=3600.0)
    """Time without an answer after which an engine's process is killed and replaced."""
    max_restarts: int = Field(default=5, gt=0, le=1000)
    """Number of engines in a row that may fail before they sample; then the run ends."""
    max_lost_per_group: int = Field(default=3, gt=0, le=100)
    """Number of lost engines after which a group that ran on them is given up (``dropped/lost``), since its
    prompt may be the cause."""
    tensor_parallel: Procs = 1
    """GPUs per engine."""
    expert_parallel: bool = False
    """Place whole experts on each GPU of an engine instead of a slice of every expert."""
    dtype: Dtype = Dtype.FLOAT32
    """Data type of the engine's weights and activations."""
    max_num_seqs: int = Field(default=64, gt=0, le=65536)
    """Maximum number of sequences that an engine decodes at once."""
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=MAX_ROW_TOKENS)
    """Maximum number of tokens in one forward pass of the engine; chunked prefill splits longer prompts."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of each process of an engine, in GiB."""
    keep_in_flight: bool = True
    """Log the tokens of unfinished responses and episodes in the host's shared memory, so that another engine
    continues them if this engine's process dies. Takes up to three times the memory of their payloads."""
    colocated: Colocated = Colocated.SHARE
    """With launcher.share_gpu: share (decoding continues during optimizer steps), or sleep (it pauses and
    leaves its memory to the step). sleep needs max_off_policy_steps 0 or 1."""
    compile: bool = False
    """Use torch.compile and (on GPUs) CUDA graphs; false: eager."""
    batch_invariant: bool = False
    """Make a response's tokens and log-probabilities bitwise independent of the other sequences in the batch.
    A synchronous run then has the same losses every time, even if it was interrupted. Costs some speed."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield a forward pass that is too small for its sequences."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            remedy = (
                f"must be at least max_num_seqs = {self.max_num_seqs}: a forward pass takes one token of each"
            )
            yield "max_num_batched_tokens", f"{remedy} sequence"
