"""Detects values that are not finite on any rank, and has all ranks act on them.

Shape suffix: T targets of a row.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgeasync.models import DEVICE_TYPE


class NonFiniteWeights(ArithmeticError):
    """Weights or optimizer state with nan or inf: they are neither published nor written."""


class MismatchTooLarge(ArithmeticError):
    """The trainer does not compute the distribution that the generators sampled from."""


def agree(*problems: str | None) -> str | None:
    """What is wrong on any rank, the same answer on every rank; None if nothing is. Collective.

    Each rank gives as many ``problems``, the one nearest to the cause first: what stands there on any rank is
    the answer before what stands behind it on others. The usual answer, None, costs one small all-reduce.
    """
    is_wrong = torch.tensor(float(any(text is not None for text in problems)), device=DEVICE_TYPE)
    dist.all_reduce(is_wrong)
    if not is_wrong:
        return None
    found: list[tuple[str | None, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, problems)
    return next(text for rank in zip(*found, strict=True) for text in rank if text is not None)


Ranges = Sequence[tuple[str, torch.Tensor]]
"""Names of tensors, each with smallest and largest value of its part on this rank: nan where any value is."""


@torch.no_grad()
def value_ranges(named: Iterable[tuple[str, torch.Tensor | None]]) -> Ranges:
    """Look at every floating-point tensor once, without a copy and without waiting for the device."""
    local = (
        (name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in named
        if tensor is not None and tensor.dtype.is_floating_point
    )
    # On a CPU a third of the time of a copy; an infinity norm takes seven times that of one.
    ranges = ((name, torch.stack(torch.aminmax(part)).float()) for name, part in local if part.numel())
    # With offloading some tensors lie on the host, others on the device.
    return [(name, ends.to(DEVICE_TYPE)) for name, ends in ranges]


def describe_non_finite(ranges: Ranges) -> str | None:
    """The first tensor that is not finite on this rank; None if all are."""
    if not ranges or bool(torch.stack([ends for _, ends in ranges]).isfinite().all()):
        return None
    name = next(name for name, ends in ranges if not ends.isfinite().all())
    return f"{name} has values that are nan or infinite {_own_rank()}"


def require_finite(named: Iterable[tuple[str, torch.Tensor]], *, what: str) -> None:
    """Refuse tensors with nan or inf; collective, so that every rank raises or none.

    Raises:
        NonFiniteWeights: says that ``what`` is refused, and names the tensor.
    """
    problem = agree(describe_non_finite(value_ranges(named)))
    if problem is not None:
        raise NonFiniteWeights(f"{what} is refused: {problem}")


def describe_row(
    index: int, loss: torch.Tensor, inputs: Mapping[str, torch.Tensor | None], mask_T: torch.Tensor
) -> str | None:
    """The first of a row's loss and ``inputs`` [T], by name, that is not finite; None if all are.

    A loss can be finite where its inputs, and so its gradients, are not: a clip cuts an infinite ratio.
    """
    given = {name: mask_T & ~values_T.isfinite() for name, values_T in inputs.items() if values_T is not None}
    is_wrong = torch.stack([~loss.isfinite(), *(is_wrong_T.any() for is_wrong_T in given.values())])
    if not bool(is_wrong.any()):
        return None
    row = f"the loss of row {index} {_own_rank()} is {float(loss)}"
    for name, is_wrong_T in given.items():
        if bool(is_wrong_T.any()):
            values_T = inputs[name]
            assert values_T is not None
            place = int(is_wrong_T.nonzero()[0])
            return f"{row}: {name} of its target {place} is {float(values_T[place])}"
    return f"{row}, although all that the objective is given is finite"


def describe_fresh_mismatch(metrics: Mapping[str, float], largest: float, *, step: int) -> str | None:
    """What is wrong if log-probabilities of tokens of age 0 differ from the generator's; None if they agree.

    They may differ by ``largest`` nats on average.
    """
    mismatch = metrics.get("mismatch/fresh_logprob_abs_mean", 0.0)
    if mismatch <= largest:
        return None
    return (
        f"step {step}: on tokens sampled under the very weights that train, log-probabilities of trainer "
        f"and generator differ by {mismatch:.3g} nats on average, more than "
        f"trainer.max_fresh_mismatch = {largest:g}: they do not compute the same distribution "
        "(temperature, kept sets, routing or weights); the step was not taken"
    )


def _own_rank() -> str:
    return f"on trainer rank {dist.get_rank()}"
