"""`x Wᵀ + b`: where nearly all of a pass's time goes.

Knows: the fastest way to multiply on this device. Does not know: what is multiplied.

On a CPU in fp32 the weight is kept in the order that oneDNN's kernels read: measured on AVX2 with two
threads, that is as fast as torch's own product for one row, 1.5 to 3 times as fast for 2 to 64 rows (decode),
and 1.2 times for prompts. torch offers this order only through the operators that its compiler emits, hence
the feature test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

CAN_PACK = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # false in builds without oneDNN


class Matrix(nn.Module):
    """`[n, inputs] -> [n, outputs]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        if self._packed is None:
            return functional.linear(x, self.weight, bias)
        return multiply_packed(x, self._packed, bias)

    def pack(self) -> None:
        """Once the weight is loaded: keep it in the kernels' order instead, where that is faster."""
        self._packed = packed(self.weight)
        if self._packed is not None:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def packed(weight: Tensor) -> Tensor | None:
    """A copy in the kernels' order; None where there is no such order."""
    if not CAN_PACK or not weight.is_cpu or weight.dtype != torch.float32:
        return None
    # No batch size is promised: the order must serve one row and a whole prompt alike.
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return result


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
