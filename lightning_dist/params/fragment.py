"""What an optimizer holds in place of a parameter: the elements that this rank updates.

People look parameters up by what they find in an optimizer's groups (``name_of[p] for p in group["params"]``, as
Lightning's `BaseFinetuning` does). A fragment therefore hashes like its parameter and equals it: such tables keep
working, and a parameter that is added twice is noticed. Other comparisons are elementwise, as for any tensor.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Fragment(nn.Parameter):
    """A run of a parameter's elements, as a view of the storage that the engine owns."""

    whole: nn.Parameter

    def __new__(cls, values: Tensor, whole: nn.Parameter) -> "Fragment":
        """Make `values` the fragment of `whole`."""
        # `.data` gives it a version counter of its own, which tells when other code than the engine writes to it
        fragment: Fragment = torch.Tensor._make_subclass(cls, values.data, True)
        fragment.whole = whole
        return fragment

    def __hash__(self) -> int:
        """The parameter's hash."""
        return hash(self.whole)

    def __eq__(self, other: object) -> bool | Tensor:  # type: ignore[override]
        """True for the parameter itself; elementwise for other tensors."""
        return True if other is self or other is self.whole else super().__eq__(other)


_COMPARISONS: set[object] = {torch.equal, torch.Tensor.__eq__}


def asked_for_identity(func: object, args: tuple[Any, ...]) -> bool | None:
    """Whether the two compared are a parameter and its fragment; None if `func` is no comparison with a fragment.

    Someone asks so whether an optimizer has this parameter, and values do not matter.
    """
    fragments = [arg for arg in args if isinstance(arg, Fragment)] if func in _COMPARISONS else []
    if not fragments:
        return None
    return any(fragment.whole is other for fragment in fragments for other in args)
