"""Ranks over ``torch.distributed``: gloo between CPUs, NCCL between GPUs, sums and bytes always through gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Group"]


class Group:
    """See :class:`halfbyte.learner.ranks.Ranks`; the default process group must be there.

    Arguments:
        device: ``cpu`` or ``cuda``, where shards live.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device, (self.size,), mesh_dim_names=("shards",))

    def add(self, x: Tensor) -> Tensor:
        """See :class:`Ranks`."""
        out = x.clone()
        dist.all_reduce(out, dist.ReduceOp.SUM)
        return out

    def largest(self, x: Tensor) -> Tensor:
        """See :class:`Ranks`."""
        out = x.clone()
        dist.all_reduce(out, dist.ReduceOp.MAX)
        return out

    def exchange(self, data: bytes) -> list[bytes]:
        """See :class:`Ranks`."""
        sizes = self._sizes(data)
        return [self._broadcast(data, rank, size) for rank, size in enumerate(sizes)]

    def collect(self, data: bytes) -> list[bytes]:
        """See :class:`Ranks`."""
        sizes = self._sizes(data)
        if self.rank:
            if data:
                dist.send(_tensor(data), 0)
            return []
        out = [data]
        for rank in range(1, self.size):
            held = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                dist.recv(held, rank)
            out.append(held.numpy().tobytes())
        return out

    def spread(self, data: bytes) -> bytes:
        """See :class:`Ranks`."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        return self._broadcast(data, 0, int(size))

    def wait(self) -> None:
        """See :class:`Ranks`."""
        self.add(torch.zeros(1))

    def _sizes(self, data: bytes) -> list[int]:
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        return [int(size) for size in self.add(sizes)]

    def _broadcast(self, data: bytes, source: int, size: int) -> bytes:
        if size == 0:
            return b""
        held = _tensor(data) if source == self.rank else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(held, source)
        return data if source == self.rank else held.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
