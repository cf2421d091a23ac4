"""Counts what optimizer steps of the trainer ask of host and GPU, without data and without a GPU.

Rank 0 of a layout makes steps with fake tensors (``tests.support.without_data``). Whatever reads the device
gets the answers of a good step: no rank has a problem, everything is finite, and all other numbers are 1.
"""

import contextlib
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import Starts, starts
from tests.support.without_data import (
    Case,
    answer,
    config_and_facts,
    group_of,
    on_pretended_device,
    patched,
    row_of,
)

aten = torch.ops.aten

SIZES_FROM_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
}
"""Operators with results whose size, or which themselves, the host reads from the device."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a call of ``train_step`` does; ``waits`` are the host's for the device."""

    waits: list[Any] = field(default_factory=list)
    """Kind, function, and file, line and source of each."""
    num_operators: int = 0
    collectives: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Steps:
    one_row: Counts
    two_rows: Counts


@starts(Starts.PROCESSES)
def count_steps(cases: Mapping[str, Case], library: Path) -> dict[str, Steps]:
    """Counts of a step of one full row, and of one of two, after a first step."""
    return {
        name: Steps(**{rows: Counts(**counts) for rows, counts in found.items()})
        for name, found in on_pretended_device(__name__, cases, library).items()
    }


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def wait(self, kind: str) -> str:
        """Count a wait; return the function of forgeasync or TorchTitan that waits."""
        frame: Any = sys._getframe(1)
        while not any(f"/{name}/" in frame.f_code.co_filename for name in ("forgeasync", "torchtitan")):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(file, line).strip()
        self.counts.waits.append([kind, frame.f_code.co_name, f"{file}:{line}: {source}"])
        return frame.f_code.co_name

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        if DTensor in types:
            # DTensor's own operators on local tensors follow.
            return NotImplemented
        keywords = keywords or {}
        # Questions about tensors and marks of the profiler are no operators.
        self.counts.num_operators += function.namespace not in ("prim", "profiler")
        if function.namespace in ("c10d", "_c10d_functional") and group_of(arguments):
            self.counts.collectives.append(function.__name__.partition(".")[0].rstrip("_"))
        first = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        if first is not None and first.device.type == "cuda":
            if function is aten._local_scalar_dense.default:
                return self._number(first)
            is_mask = function is aten.index.Tensor and torch.bool in {
                x.dtype for x in arguments[1] if x is not None
            }
            if is_mask or function in SIZES_FROM_VALUES:
                self.wait("size")
            if is_mask:
                return torch.empty_like(first)
        result = function(*arguments, **keywords)
        if function is aten.all.default:
            result.is_true = True
        elif function in (aten._to_copy.default, aten.copy_.default):
            source = arguments[function is aten.copy_.default]
            devices = source.device.type, result.device.type
            is_non_blocking = keywords.get("non_blocking", False) or True in arguments[2:]
            if devices == ("cuda", "cpu"):
                self.wait("download")
                with unset_fake_temporarily():
                    return torch.ones(result.shape, dtype=result.dtype)
            if devices == ("cpu", "cuda") and not (is_non_blocking and hasattr(source, "was_pinned")):
                self.wait("upload")
        return result

    def _number(self, tensor: torch.Tensor) -> float:
        function = self.wait("read")
        if tensor.dtype is torch.bool:
            return hasattr(tensor, "is_true")
        return 0 if function == "agree_on_problem" else 1


@contextlib.contextmanager
def _counting() -> Iterator[Counts]:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher as Dispatcher

    mode, exchange = _Counting(), Dispatcher._sync_token_count_exchange

    def count_exchange(*arguments: Any) -> Any:
        mode.wait("splits")
        return exchange(*arguments)

    def gather(found: list[Any], own: object, group: object = None) -> None:
        mode.counts.collectives.append("all_gather_object")
        found[:] = [own] * len(found)

    def pin(tensor: Any) -> Any:
        tensor.was_pinned = True
        return tensor

    def count_list(tensor: torch.Tensor) -> Any:
        is_on_device = tensor.device.type == "cuda"
        if is_on_device:
            mode.wait("read")
        # On the host: where kept sets begin; no vocabulary is cut.
        return np.full(tensor.shape, int(is_on_device)).tolist()

    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (Dispatcher, "_sync_token_count_exchange", count_exchange),
            (dist, "all_gather_object", gather),
            (torch.Tensor, "pin_memory", pin),
            (FakeTensor, "tolist", count_list),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mode)
        yield mode.counts


def _count(case: Case) -> Steps:
    from forgeasync.rollouts import BranchKey, RolloutKey
    from forgeasync.trainer import PolicyTrainer, Source, TrainerSetup
    from forgeasync.trainer.packing import PlacedSource

    config, facts = config_and_facts(case)
    key = BranchKey(rollout=RolloutKey(group_id=0, episode=0, agent=0), branch=0)
    num_tokens, num_targets = config.model.max_context_length, config.sampling.max_response_tokens
    source = PlacedSource(
        source=Source(key=key, is_recorded=True),
        places_S=np.arange(num_tokens),
        num_prompt_tokens=num_tokens - num_targets,
    )
    row = replace(row_of(case, config, facts), sources=(source,))
    setup = TrainerSetup(
        section=config.trainer,
        facts=facts,
        temperature=config.sampling.temperature,
        loss=config.algorithm,
        seed=0,
        checkpoint=None,
    )
    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group("fake", rank=0, world_size=config.trainer.parallel.num_procs, store=FakeStore())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with patched(fake, num_tokens * facts.top_k):
        trainer = PolicyTrainer(setup)
        found = []
        with fake:
            for rows in ([row], [row], [row, row]):
                with _counting() as counts:
                    trainer.train_step(rows)
                found.append(counts)
    dist.destroy_process_group()
    return Steps(one_row=found[1], two_rows=found[2])


if __name__ == "__main__":
    answer(_count, Path(sys.argv[1]))
