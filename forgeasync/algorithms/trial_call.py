"""Tries a loss of a user's own on a few made-up tokens: what is wrong with it shows before a run starts.

Shape suffix: T tokens.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from forgeasync.config.loss_schema import PythonObjective
from forgeasync.config.problems import Problem
from forgeasync.config.python_factory import load_factory

FIELD = "algorithm.objective.factory"

KEYWORDS = ("logprobs_T", "behavior_logprobs_T", "advantages_T", "mask_T", "sequence_ids_T")
"""What an objective is called with, all by name."""

EXPECTED = "must return (losses_T, sums): a loss for every token, and scalars by name"


def check_own_objective(section: PythonObjective) -> Iterator[Problem]:
    """What would end or silently spoil a run with this objective: at most one problem.

    The factory is called with its options, and what it returns on 8 tokens of 4 sequences (ratios around 1,
    advantages of both signs, one token masked out) and on a row without tokens, which ranks with less to do
    than others get. Imports and runs the user's code.
    """
    try:
        objective = _build(section)
        _try_on(objective, _ordinary_tokens(), "8 made-up tokens", needs_gradient=True)
        empty = {name: tensor[:0] for name, tensor in _ordinary_tokens().items()}
        _try_on(objective, empty, "a row without tokens, which some ranks get", needs_gradient=False)
    except ValueError as error:
        yield Problem(field=FIELD, value=section.factory, remedy=str(error))


def check_objective_result(losses_T: object, sums: object, like_T: torch.Tensor) -> None:
    """Whether an objective returned what its caller goes on with; looks at no value, so nothing waits.

    ``like_T`` is any tensor [T] of the tokens that it was called on.

    Raises:
        ValueError: says what came back and what would be right.
    """
    if not isinstance(losses_T, torch.Tensor):
        raise ValueError(f"its losses are a {type(losses_T).__name__}; {EXPECTED}")
    if losses_T.shape != like_T.shape:
        # A scalar would be broadcast, and weigh as many times as there are tokens.
        raise ValueError(
            f"its losses have shape {list(losses_T.shape)} on {len(like_T)} tokens; must be "
            f"[{len(like_T)}], one loss for every token: masking and averaging come after"
        )
    if not losses_T.is_floating_point():
        raise ValueError(f"its losses are {losses_T.dtype}; must be floating-point numbers")
    if not isinstance(sums, Mapping):
        raise ValueError(f"its sums are a {type(sums).__name__}; {EXPECTED}")
    for name, value in sums.items():
        if not isinstance(name, str):
            raise ValueError(
                f"its sums have a key {name!r}; must be names of metrics, such as 'objective/gate'"
            )
        if isinstance(value, torch.Tensor) and value.ndim:
            raise ValueError(
                f"its sum {name!r} has shape {list(value.shape)}; must be a scalar, summed over masked tokens"
            )
        if not isinstance(value, torch.Tensor | int | float):
            raise ValueError(f"its sum {name!r} is a {type(value).__name__}; must be a scalar tensor")


def _build(section: PythonObjective) -> Callable[..., object]:
    factory = load_factory(section.factory)
    try:
        objective = factory(**section.options)
    except Exception as error:
        # Whatever the user's code raises is for the user to see.
        raise ValueError(
            f"raised {type(error).__name__}: {error} when it was called with {section.options}"
        ) from error
    if not callable(objective):
        raise ValueError(
            f"returned a {type(objective).__name__}; must return a function of {', '.join(KEYWORDS)}"
        )
    try:
        signature = inspect.signature(objective)
    except ValueError:
        # Some builtins have none: the call itself will tell.
        return objective
    try:
        signature.bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise ValueError(
            f"returned a function that takes {signature} ({error}); must take as keywords "
            f"{', '.join(KEYWORDS)}"
        ) from error
    return objective


def _ordinary_tokens() -> dict[str, torch.Tensor]:
    """Inputs as a run makes them; the first sequence has the ratio 1."""
    behavior_T = torch.tensor([-0.7, -1.2, -0.1, -2.3, -0.9, -0.4, -1.6, -3.0])
    drift_T = torch.tensor([0.0, 0.0, 0.02, -0.01, -0.03, 0.01, 0.05, 0.0])
    return {
        "logprobs_T": behavior_T + drift_T,
        "behavior_logprobs_T": behavior_T,
        "advantages_T": torch.tensor([1.0, 1.0, -0.5, -0.5, 0.8, 0.8, -1.3, -1.3]),
        "mask_T": torch.tensor([True, True, True, True, True, True, True, False]),
        "sequence_ids_T": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    }


def _try_on(
    objective: Callable[..., object], tokens: dict[str, torch.Tensor], where: str, *, needs_gradient: bool
) -> None:
    leaf_T = tokens["logprobs_T"].clone().requires_grad_()
    mask_T = tokens["mask_T"]
    try:
        # In a run log-probabilities are computed too: no leaf of the graph.
        result = objective(**tokens | {"logprobs_T": leaf_T * 1.0})
    except Exception as error:
        raise ValueError(f"its function raised {type(error).__name__}: {error} on {where}") from error
    if not (isinstance(result, tuple) and len(result) == 2):
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        if isinstance(result, torch.Tensor):
            found += f" of shape {list(result.shape)}"
        raise ValueError(f"its function returned {found} on {where}; {EXPECTED}")
    losses_T, sums = result
    check_objective_result(losses_T, sums, leaf_T)
    for name, value in sums.items():
        number = float(value.detach()) if isinstance(value, torch.Tensor) else value
        if not math.isfinite(number):
            raise ValueError(f"its sum {name!r} is {number} on {where}; must be finite")
    if not losses_T[mask_T].isfinite().all():
        raise ValueError(f"its losses are {_shown(losses_T)} on {where}; must be finite where mask_T is true")
    if needs_gradient:
        _check_gradient(losses_T, leaf_T, mask_T)


def _check_gradient(losses_T: torch.Tensor, leaf_T: torch.Tensor, mask_T: torch.Tensor) -> None:
    gradient_T = None
    if losses_T.requires_grad:
        (gradient_T,) = torch.autograd.grad(
            torch.where(mask_T, losses_T, 0.0).sum(), leaf_T, allow_unused=True
        )
    if gradient_T is None:
        raise ValueError(
            "no gradient reaches logprobs_T from its losses; they must be computed from logprobs_T, not "
            "detached"
        )
    if not gradient_T.isfinite().all():
        raise ValueError(f"the gradient of its losses by logprobs_T is {_shown(gradient_T)}; must be finite")
    if not gradient_T[mask_T].any():
        raise ValueError(
            "the gradient of its losses by logprobs_T is 0 for every token; nothing would be learned"
        )


def _shown(values_T: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values_T.detach().double().tolist()) + "]"
