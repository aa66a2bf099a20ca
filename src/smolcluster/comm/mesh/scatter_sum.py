"""reduce_scatter over gloo with half the bytes of torch's implementation.

torch all-reduces the whole tensor and keeps a part. Here every rank sends each other rank its part (all_to_all) and sums the
received parts in rank order: (N-1)/N S bytes instead of 2 (N-1)/N S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Summed:
    """Work of an all_to_all; `wait` sums the received parts."""

    def __init__(self, work: dist.Work, parts: Tensor, output: Tensor) -> None:
        self._work, self._parts, self._output = work, parts, output

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._parts, dim=0, dtype=self._output.dtype, out=self._output.view(-1))


def scatter_sum(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Summed:
    parts = torch.empty_like(tensor)
    work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
    return Summed(work, parts.view(group.size(), -1), output)


class ScatterSum:
    """The interface of FSDP2 (`FSDPModule.set_custom_reduce_scatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        scatter_sum(output_tensor, input_tensor, group).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
