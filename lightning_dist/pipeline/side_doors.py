"""Does the loss come from the chain by its end alone?

Something may leave a layer by a side door that Python does not show: a hook that collects the router's logits of all
layers for an auxiliary loss, an attribute in which every block leaves its own. In a pipeline the last stage would see
its own layers' share and nothing of the others', and the loss would be wrong without a word. The graph tells: walked
back from the loss, and no further than the input and output of the last layer, it must not come to a parameter of one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from lightning_dist.core.errors import UnsupportedModelError


def refuse_side_doors(returned: Any, ends: Sequence[Tensor], inside: Mapping[nn.Parameter, str]) -> None:
    """Walk the graph of what a step returned.

    Args:
        ends: what the last layer was called with, and what it returned.
        inside: the parameters that only layers hold, with their names.

    Raises:
        UnsupportedModelError: it comes to a parameter of a layer by another way than `ends`.
    """
    passed = {tensor.grad_fn for tensor in ends if tensor.grad_fn is not None}
    left: list[Node] = [
        leaf.grad_fn for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    seen = set(left)
    while left:
        node = left.pop()
        if node in passed:
            continue
        name = inside.get(getattr(node, "variable", None))  # type: ignore[arg-type]
        if name is not None:
            raise UnsupportedModelError(
                f"the loss depends on {name} by another way than the output of the last layer: something from inside "
                "a layer is collected for it (an auxiliary loss over all layers, a hook on activations). In a pipeline "
                "the layers of other stages would be missing from it. Switch it off (output_router_logits=False, "
                "for instance), or add it to the hidden state inside each layer"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
