"""`x Wᵀ + b`: where nearly all of a pass's time goes.

Knows: the fastest way to multiply on this device. Does not know: what is multiplied.

On a CPU in fp32 a weight with more outputs than inputs (queries, gate, vocabulary) is kept twice, because no
order of it is fast for both ends; measured on AVX2 with one and two threads, beside torch's own product:

- inputs first: twice as fast for one row, which is all that a lone request's decode step has;
- in the order that oneDNN's kernels read: 1.5 to 3 times as fast for 2 to 64 rows, 1.2 times for prompts.
  torch offers it only through the operators that its compiler emits, hence the feature test. A vocabulary
  that is tied to the embedding is then held a third time, plain: with AVX-512 it takes 4 rows half the time.

A weight with fewer outputs gains from neither. It stays as it is, and few rows are multiplied as `(W xᵀ)ᵀ`:
the same sums in a kernel that is 1.2 to 2 times as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

CAN_PACK = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # false in builds without oneDNN
FEW_ROWS = 128


class Matrix(nn.Module):
    """`[n, inputs] -> [n, outputs]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self._inputs_first: Tensor | None = None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        if len(x) == 1 and self._inputs_first is not None:
            return _one_row(x, self._inputs_first, bias)
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
            return product
        if x.is_cpu and 1 < len(x) <= FEW_ROWS:
            return _few_rows(x, self.weight, bias)
        return functional.linear(x, self.weight, bias)

    def arrange(self) -> None:
        """Once the weight is loaded: bring it into the orders that the kernels like."""
        outputs, inputs = self.weight.shape
        if not self.weight.is_cpu or self.weight.dtype != torch.float32 or outputs <= inputs:
            return
        self._inputs_first = self.weight.t().contiguous()
        if CAN_PACK:
            # No batch size is promised: the order must serve a few rows and a whole prompt alike.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _one_row(x: Tensor, inputs_first: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, inputs_first) if bias is None else torch.addmm(bias, x, inputs_first)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return product.t().contiguous()
