"""`x Wᵀ + b`: where nearly all of a pass's time goes.

Knows: the fastest way to multiply on this device. Does not know: what is multiplied.

Three ways on a CPU in fp32, as measured on AVX2 with one and two threads: - A weight with more outputs than
inputs (queries, gate, vocabulary) is kept in the order that oneDNN's kernels read:
  as fast as torch's own product for one row, 1.5 to 3 times as fast for 2 to 64 rows (decode), 1.2 times for
  prompts. torch offers that order only through the operators that its compiler emits, hence the feature test.
- The others would lose up to a third of their speed for one row that way. They stay as they are, and few rows
are
  multiplied as `(W xᵀ)ᵀ`: the same sums in a kernel that is 1.2 to 2 times as fast.
- Everything else is torch's own product.
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
        self._packed: Tensor | None = None

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
            return product
        if x.is_cpu and 1 < len(x) <= FEW_ROWS:
            return _few_rows(x, self.weight, bias)
        return functional.linear(x, self.weight, bias)

    def pack(self) -> None:
        """Once the weight is loaded: keep it in oneDNN's order instead, where that is faster."""
        outputs, inputs = self.weight.shape
        if CAN_PACK and self.weight.is_cpu and self.weight.dtype == torch.float32 and outputs > inputs:
            # No batch size is promised: the order must serve one row and a whole prompt alike.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return product.t().contiguous()
