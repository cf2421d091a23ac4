"""When an engine's steps ended, under which weights, and how many tokens came of them."""

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

    from forgeasync.generator import InProcessAsyncClient


class StepClock:
    """Looks at every step of an engine from now on."""

    def __init__(self, client: "InProcessAsyncClient") -> None:
        self.ends: list[tuple[float, str]] = []
        """Time and weight version of every step."""
        self.num_tokens = 0
        self._client = client
        self._step, self._hand_over = client._step, client._hand_over
        client._step, client._hand_over = self._timed_step, self._counting_hand_over

    def _timed_step(self) -> None:
        version = self._client._core.get_weight_version()
        self._step()
        self.ends.append((time.perf_counter(), version))

    def _counting_hand_over(self, item: "EngineCoreOutputs | BaseException") -> None:
        if not isinstance(item, BaseException):
            self.num_tokens += sum(len(output.new_token_ids) for output in item.outputs)
        self._hand_over(item)

    def gaps(self, start: int = 0) -> list[float]:
        """Seconds between one step's end and the next one's, from a step on."""
        return [b[0] - a[0] for a, b in itertools.pairwise(self.ends[start:])]

    async def steps(self, count: int) -> None:
        """Wait for as many more steps."""
        last = len(self.ends) + count
        while len(self.ends) < last:
            await asyncio.sleep(0.001)

    async def gap_before(self, version: int) -> float:
        """The gap before the first step under ``version``; waits for it."""
        while self.ends[-1][1] != str(version):
            await asyncio.sleep(0.001)
        index = next(i for i, (_, found) in enumerate(self.ends) if found == str(version))
        return self.ends[index][0] - self.ends[index - 1][0]
