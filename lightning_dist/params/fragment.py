"""What an optimizer holds in place of a parameter: the elements that this rank updates.

People look parameters up by what they find in an optimizer's groups (``name_of[p] for p in group["params"]``, as
Lightning's `BaseFinetuning` does). A fragment therefore hashes like its parameter and equals it: such tables keep
working, and a parameter that is added twice is noticed. Other comparisons are elementwise, as for any tensor.

What is done element by element is right on a fragment and on its gradient. What adds up elements (a norm, a mean) would
be right only on all ranks' fragments together, so it is refused: each rank would get another number, and clip by
another factor.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import ShardedGradientError


def _functions(names: tuple[str, ...]) -> set[object]:
    homes = (torch, torch.Tensor, torch.linalg)
    return {getattr(home, name) for home in homes for name in names if hasattr(home, name)}


REDUCTIONS = _functions(
    (
        *("norm", "vector_norm", "matrix_norm", "dist", "cdist", "_foreach_norm", "_foreach_max", "_foreach_powsum"),
        *("sum", "nansum", "mean", "nanmean", "std", "var", "std_mean", "var_mean", "prod", "logsumexp"),
        *("median", "nanmedian", "mode", "quantile", "nanquantile", "histc", "histogram", "bincount", "trace"),
        *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort", "argsort", "topk", "kthvalue", "unique"),
        *("dot", "vdot", "inner", "outer", "cumsum", "cumprod", "softmax", "log_softmax", "renorm"),
    )
)
"""Functions whose result on a part says little about the whole."""


def _refuse_reduction(func: object, leaves: list[object], kinds: tuple[type, ...]) -> None:
    if func in REDUCTIONS and any(isinstance(leaf, kinds) and getattr(leaf, "partial", True) for leaf in leaves):
        name = getattr(func, "__name__", "this")
        raise ShardedGradientError(
            f"{name} of what an optimizer holds: that is this rank's part of a parameter (or of its gradient), so "
            "every rank would get another number. For clipping use Trainer(gradient_clip_val=...), "
            "self.clip_gradients(...) or strategy.clip_grad_norm(optimizer, max_norm); for norms "
            "strategy.grad_norms(); for anything else read whole values inside `with strategy.gathered(module, "
            "gradients=True):` on all ranks"
        )


class PieceGradient(Tensor):
    """The gradient of a fragment that is a part of its parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of a plain tensor, but for what adds up elements."""
        if func in REDUCTIONS:
            _refuse_reduction(func, pytree.tree_leaves((args, kwargs)), (PieceGradient, Fragment))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Fragment(nn.Parameter):
    """A run of a parameter's elements, as a view of the storage that the engine owns.

    `partial` says whether other ranks hold the rest of it.
    """

    whole: nn.Parameter
    partial: bool

    def __new__(cls, values: Tensor, whole: nn.Parameter, *, partial: bool) -> "Fragment":
        """Make `values` the fragment of `whole`."""
        # `.data` gives it a version counter of its own, which tells when other code than the engine writes to it
        fragment: Fragment = torch.Tensor._make_subclass(cls, values.data, True)
        fragment.whole, fragment.partial = whole, partial
        return fragment

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, which refuses to be added up where it is a part."""
        gradient = self.own_gradient
        return gradient.as_subclass(PieceGradient) if gradient is not None and self.partial else gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        plain = gradient.as_subclass(Tensor) if isinstance(gradient, PieceGradient) else gradient
        _GRADIENT.__set__(self, plain)

    @property
    def own_gradient(self) -> Tensor | None:
        """Its gradient as a plain tensor, for those who know that it is a part."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient: Tensor | None = _GRADIENT.__get__(self)
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of a plain parameter, but for what adds up elements."""
        if (same := asked_for_identity(func, args)) is not None:
            return same
        if func in REDUCTIONS:
            _refuse_reduction(func, pytree.tree_leaves((args, kwargs)), (PieceGradient, Fragment))
        if any(not issubclass(kind, (Fragment, PieceGradient)) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a cut or released parameter brings its values first
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __hash__(self) -> int:
        """The parameter's hash."""
        return hash(self.whole)

    def __eq__(self, other: object) -> bool | Tensor:  # type: ignore[override]
        """True for the parameter itself; elementwise for other tensors."""
        return True if other is self or other is self.whole else super().__eq__(other)


_PLAIN = (Tensor, nn.Parameter)
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
if isinstance(getattr(optimizers, "_foreach_supported_types", None), list):
    optimizers._foreach_supported_types.append(Fragment)  # else optimizers would step them one by one on a GPU


_COMPARISONS: set[object] = {torch.equal, torch.Tensor.__eq__}


def asked_for_identity(func: object, args: tuple[Any, ...]) -> bool | None:
    """Whether the two compared are a parameter and its fragment; None if `func` is no comparison with a fragment.

    Someone asks so whether an optimizer has this parameter, and values do not matter.
    """
    fragments = [arg for arg in args if isinstance(arg, Fragment)] if func in _COMPARISONS else []
    if not fragments or all(isinstance(arg, Fragment) or type(arg) in _PLAIN for arg in args):
        return None
    return any(fragment.whole is other for fragment in fragments for other in args)
