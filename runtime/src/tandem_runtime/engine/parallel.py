"""The ranks of one model replica and the collectives that its forward pass needs.

Knows: who takes part, gloo or nccl. Does not know: layers, weights.

All ranks of a replica live in one pod, so the rendezvous is a file and the sockets are on loopback. A single
rank needs no process group, and its collectives do nothing.

A rank that raises in the middle of a pass leaves the others waiting in a collective; the timeout bounds that
wait, and the pass is then fatal on every rank, because nobody knows any more which collective is next.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

COLLECTIVE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Group:
    """`rank` of `size`. With size 1 nothing is sent."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate equal shapes along the last dimension, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def share(self, total: int) -> slice:
        """This rank's part of `total` equal things; `total` is a multiple of `size`."""
        assert total % self.size == 0, (total, self.size)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(rank: int, size: int, store: Path, device: Literal["cpu", "cuda"]) -> Group:
    """Meet the other ranks at `store`, a path that only this replica uses and that does not exist yet."""
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    return Group(rank, size)
