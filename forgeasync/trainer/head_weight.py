"""Products of hidden states with the output layer's weight, whose gradient is summed in float32.

Tokens come in chunks, and a chunk may read single rows of the weight. Autograd would sum their gradients in
the weight's dtype: in bfloat16 every addition rounds to 8 bits, an error of several percent for rows that
many tokens read. Here the whole gradient is summed in float32 and rounded once.

Shape suffixes: T tokens; U tokens whose logits are all computed; N pairs of a token and an id; D model dim; v
this rank's slice of the vocabulary; R rows of the weight that pairs read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from forgeasync.models import GATHER_BLOCK_BYTES


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of values of ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class RowSums:
    """Sum, in at least float32, of products and of single rows, with the shape of a weight [v, D].

    While only rows are added, only these rows use memory, unless the weight itself has the sum's dtype.
    """

    def __init__(self, weight_vD: torch.Tensor) -> None:
        self._weight_vD = weight_vD.detach()
        self._dtype = sum_dtype(weight_vD.dtype)
        self._task = -1
        self._clear()

    def _clear(self) -> None:
        self._whole_vD: torch.Tensor | None = None
        self._rows_RD: torch.Tensor | None = None
        self._id_R = self._weight_vD.new_empty(0, dtype=torch.int64)
        self._row_of_v: torch.Tensor | None = None

    def begin(self) -> None:
        """Discard the additions of an earlier backward pass that did not call ``take``."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._clear()

    def add_product(self, grad_Uv: torch.Tensor, hidden_UD: torch.Tensor) -> None:
        """Add ``grad.T @ hidden``."""
        if self._whole_vD is None and self._rows_RD is None:
            # Nothing was added before: the product itself sums in float32.
            self._whole_vD = grad_Uv.T @ hidden_UD
            return
        whole_vD = self._whole()
        if whole_vD.dtype == hidden_UD.dtype:
            whole_vD.addmm_(grad_Uv.T, hidden_UD)
        else:
            whole_vD += grad_Uv.T @ hidden_UD

    def rows_of(self, id_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor to add rows to in place, and the index of its row for each id [N]."""
        if self._whole_vD is not None or self._weight_vD.dtype == self._dtype:
            return self._whole(), id_N
        if self._row_of_v is None or self._rows_RD is None:
            self._row_of_v = id_N.new_full((len(self._weight_vD),), -1)
            self._rows_RD = self._weight_vD.new_empty(0, self._weight_vD.shape[1], dtype=self._dtype)
        new_R = id_N[self._row_of_v[id_N] < 0].unique()
        if len(new_R):
            self._row_of_v[new_R] = torch.arange(len(new_R), device=new_R.device) + len(self._id_R)
            self._id_R = torch.cat([self._id_R, new_R])
            zeros_RD = self._rows_RD.new_zeros(len(new_R), self._rows_RD.shape[1])
            self._rows_RD = torch.cat([self._rows_RD, zeros_RD])
        return self._rows_RD, self._row_of_v[id_N]

    def _whole(self) -> torch.Tensor:
        if self._whole_vD is None:
            self._whole_vD = self._with_rows(self._dtype)
        self._whole_vD = self._whole_vD.to(self._dtype)
        return self._whole_vD

    def _with_rows(self, dtype: torch.dtype) -> torch.Tensor:
        whole_vD = torch.zeros_like(self._weight_vD, dtype=dtype)
        if self._rows_RD is not None:
            whole_vD[self._id_R] = self._rows_RD.to(dtype)
            self._rows_RD = None
        return whole_vD

    def take(self) -> torch.Tensor:
        """Return the sum in the weight's dtype, and start the next one at zero."""
        dtype = self._weight_vD.dtype
        total_vD = self._with_rows(dtype) if self._whole_vD is None else self._whole_vD.to(dtype)
        self._clear()
        return total_vD


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeight:
    """Output layer's weight [v, D] for any number of products, with one gradient for all of them."""

    local_vD: torch.Tensor
    """Detached weight."""
    sums: RowSums
    handle: torch.Tensor
    """Scalar on which every product depends; its backward pass returns the weight's gradient."""

    @classmethod
    def of(cls, weight_vD: torch.Tensor) -> "HeadWeight":
        """Wrap a weight, or this rank's slice of one."""
        sums = RowSums(weight_vD)
        return cls(local_vD=weight_vD.detach(), sums=sums, handle=_Summed.apply(weight_vD, sums))

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ids [T, v]."""
        return _Logits.apply(hidden_TD, self.local_vD, self.handle, self.sums)

    def some_logits(
        self, hidden_TD: torch.Tensor, token_N: torch.Tensor, id_N: torch.Tensor, token_U: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of pairs of token and id [N] and, for some tokens, of all ids [U, v].

        Those of pairs are in at least float32.
        """
        return _SomeLogits.apply(hidden_TD, self.local_vD, self.handle, token_N, id_N, token_U, self.sums)


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    sums: RowSums


class _Summed(torch.autograd.Function):
    """Stand-in for the weight in products; its backward pass runs after those of all products."""

    @staticmethod
    def forward(ctx: _Context, weight_vD: torch.Tensor, sums: RowSums) -> torch.Tensor:
        ctx.sums = sums
        return weight_vD.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sums.begin()
        return ctx.sums.take(), None


class _Logits(torch.autograd.Function):
    """Logits of all ids [T, v]."""

    @staticmethod
    def forward(
        ctx: _Context, hidden_TD: torch.Tensor, weight_vD: torch.Tensor, handle: torch.Tensor, sums: RowSums
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TD, weight_vD)
        ctx.sums = sums
        return hidden_TD @ weight_vD.T

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_Tv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_vD = ctx.saved_tensors
        needs_hidden, _, needs_weight, _ = ctx.needs_input_grad
        grad_hidden_TD = grad_Tv @ weight_vD if needs_hidden else None
        if needs_weight:
            ctx.sums.begin()
            ctx.sums.add_product(grad_Tv, hidden_TD)
        return grad_hidden_TD, None, grad_Tv.new_zeros(()) if needs_weight else None, None


class _SomeLogits(torch.autograd.Function):
    """Logits of pairs of token and id [N], and of all ids for some tokens [U, v].

    Rows of pairs are gathered in blocks of ``GATHER_BLOCK_BYTES``: autograd would keep those of all pairs
    from the forward to the backward pass.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_TD: torch.Tensor,
        weight_vD: torch.Tensor,
        handle: torch.Tensor,
        token_N: torch.Tensor,
        id_N: torch.Tensor,
        token_U: torch.Tensor,
        sums: RowSums,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden_TD, weight_vD, token_N, id_N, token_U)
        ctx.sums = sums
        dtype = sum_dtype(hidden_TD.dtype)
        dots_N = torch.empty(len(id_N), dtype=dtype, device=id_N.device)
        for block in _blocks(hidden_TD, len(id_N)):
            rows = hidden_TD[token_N[block]].to(dtype)
            dots_N[block] = rows.mul_(weight_vD[id_N[block]]).sum(-1)
        return dots_N, hidden_TD[token_U] @ weight_vD.T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_N: torch.Tensor, grad_Uv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_vD, token_N, id_N, token_U = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[2]
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=grad_N.dtype)
        grad_hidden_TD[token_U] = (grad_Uv @ weight_vD).to(grad_N.dtype)
        if needs_weight:
            ctx.sums.begin()
            if len(token_U):
                ctx.sums.add_product(grad_Uv, hidden_TD[token_U])
            grad_rows, row_N = ctx.sums.rows_of(id_N)
        for block in _blocks(hidden_TD, len(id_N)):
            factors = grad_N[block, None]
            # On GPUs too, ``index_put_`` adds in a fixed order; ``index_add_`` does not.
            rows = weight_vD[id_N[block]].to(grad_N.dtype).mul_(factors)
            grad_hidden_TD.index_put_((token_N[block],), rows, accumulate=True)
            if needs_weight:
                rows = hidden_TD[token_N[block]].to(grad_N.dtype).mul_(factors)
                grad_rows.index_put_((row_N[block],), rows, accumulate=True)
        grad_handle = grad_N.new_zeros((), dtype=weight_vD.dtype) if needs_weight else None
        return grad_hidden_TD.to(hidden_TD.dtype), None, grad_handle, None, None, None, None


def _blocks(hidden_TD: torch.Tensor, num_pairs: int) -> Iterator[slice]:
    """Return slices of the pairs; two rows of each pair exist in float32 (float64) at once."""
    element = sum_dtype(hidden_TD.dtype).itemsize
    size = max(1, GATHER_BLOCK_BYTES // (2 * element * hidden_TD.shape[1]))
    return (slice(start, start + size) for start in range(0, num_pairs, size))
