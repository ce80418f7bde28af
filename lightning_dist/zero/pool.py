"""A pool of flat buffers that come and go every step.

Gradients on their way and staging space for the network are needed for milliseconds, again and again. Handing
large blocks back to the system each time costs a page fault per 4 KiB when they are touched next (100,000 a
step were measured), so freed buffers are lent again for as long as backward lasts. Then they go, since the next
forward needs the memory for its activations.
"""

import torch
from torch import Tensor


class BufferPool:
    """Lends flat tensors; the smallest kept block that is large enough serves, else a new one is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}  # keeps what is lent alive, so that no id is used twice

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of `numel` elements with arbitrary contents, to be given back by `give`."""
        num_bytes = max(numel * dtype.itemsize, 1)
        fitting = [block for block in self._free if num_bytes <= block.numel() <= 2 * num_bytes]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [kept for kept in self._free if kept is not block]
        else:
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        flat = block[: numel * dtype.itemsize].view(dtype)
        self._lent[id(flat)] = (flat, block)
        return flat

    def give(self, flat: Tensor) -> None:
        """Take back a tensor that `take` lent; any other tensor is left to the allocator."""
        lent = self._lent.pop(id(flat), None)
        if lent is not None:
            self._free.append(lent[1])

    def forget(self, flat: Tensor) -> None:
        """Leave a lent tensor to whoever still holds it."""
        self._lent.pop(id(flat), None)

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool keeps, lent or not."""
        return sum(block.numel() for block in (*self._free, *(block for _, block in self._lent.values())))

    def clear(self) -> None:
        """Hand all free blocks back to the allocator."""
        self._free.clear()
