"""How long the steps of an engine take in which every sequence decodes one token, by how many there are.

Steps of other kinds would compare badly with those of another engine: in some a prompt is computed, or what
an update of the weights has made invalid. So a step counts only if every sequence in it has sampled, and each
of them in the step before as well. Standing still between two steps does not count.
"""

from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from forgeasync.generator.reports import DecodeSteps


class StepTimes:
    """Counts steps on the engine's thread; others may read at any time."""

    def __init__(self) -> None:
        self._before: frozenset[str] = frozenset()
        """Sequences that have sampled in the step before."""
        self._counts: dict[int, DecodeSteps] = {}
        self.total_s = 0.0
        """Of all steps, also those of other kinds."""

    def stepped(self, outputs: EngineCoreOutputs | None, running: Sequence[Request], step_s: float) -> None:
        """Take note of a step; ``running`` are the sequences that go on after it."""
        self.total_s += step_s
        sampled = [] if outputs is None else [one.request_id for one in outputs.outputs if one.new_token_ids]
        before, self._before = self._before, frozenset(sampled)
        if not sampled or not before.issuperset(sampled):
            return
        if not self._before.issuperset(one.request_id for one in running):
            return
        load = len(sampled).bit_length()
        known = self._counts.get(load, DecodeSteps())
        self._counts[load] = DecodeSteps(num_steps=known.num_steps + 1, took_s=known.took_s + step_s)

    def counts(self) -> dict[int, DecodeSteps]:
        """All steps so far, by the number of bits of the number of sequences in them."""
        return dict(self._counts)
