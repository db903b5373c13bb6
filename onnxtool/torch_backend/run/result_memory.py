"""Memory for large results of PyTorch's kernels, used again from call to call.

PyTorch's allocator gives large blocks back to the system, and the pages of the next one are cleared while they are
written: that takes as long as half of a matmul of 1024 x 256 by 256 x 30522. onnxruntime keeps its memory as well.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtool.torch_backend.nodes import Node, is_static

aten = torch.ops.aten
_WITH_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out}


class ResultMemory:
    """Blocks of memory by their size in bytes; as many as were in use at one time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of the CPU; when nothing refers to it any more, its memory is free again."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free[size]
        try:  # other threads take from the list as well
            block = free.pop()
        except IndexError:
            block = torch.empty(size, dtype=torch.uint8)
        owner = block.numpy()  # the storage of the tensor below keeps this array, and nothing else does
        weakref.finalize(owner, free.append, block).atexit = False
        return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def with_result_memory(node: Node, memory: ResultMemory) -> Callable[..., Any]:
    """Return a function that computes what `node` calls, with its result in `memory` where the kernel allows that.

    The node gives a tensor of the CPU. One whose shape differs from call to call would need memory for each.
    """
    target: Callable[..., Any] = node.target
    kernel, result = _WITH_OUT.get(target), node.meta["val"]
    if kernel is None or not is_static(result) or not result.is_contiguous():
        return target
    shape, dtype = tuple(result.shape), result.dtype

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel(*arguments, **options, out=memory.allocate(shape, dtype))

    call.__name__ = call.__qualname__ = node.name
    return call
