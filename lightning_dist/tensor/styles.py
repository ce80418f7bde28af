"""Tensor-parallel styles: one table from names to what they do. The names are the dialect of Hugging Face's plans.

========================  ==============================================================================
style                     meaning for a linear (weight of shape (out, in))
========================  ==============================================================================
colwise                   output features divided: the input is whole, the output stays divided
rowwise                   input features divided: the outputs are summands and are added up
packed_colwise            colwise, of two fused projections (gate and up): each is divided
qkv_colwise               colwise, of a fused query-key-value projection: each of the three is divided
embedding_rowwise         for an embedding: the words are divided
moe_tp_experts            for a module of experts: its output is a summand
replicate                 whole on every rank
========================  ==============================================================================
"""

from dataclasses import dataclass
from enum import Enum

from lightning_dist.core.errors import ConfigurationError


class Side(Enum):
    """Which dim of a weight is cut."""

    OUT = "out"
    IN = "in"
    NONE = "none"


@dataclass(frozen=True)
class Style:
    """`side` of the weight that is cut, in so many fused `blocks`; `experts`: the module adds up its output."""

    side: Side
    blocks: int = 1
    experts: bool = False


_COLUMN, _ROW, _WHOLE = Style(Side.OUT), Style(Side.IN), Style(Side.NONE)

STYLES: dict[str, Style] = {
    "colwise": _COLUMN,
    "rowwise": _ROW,
    "packed_colwise": Style(Side.OUT, blocks=2),
    "packed_rowwise": Style(Side.IN, blocks=2),
    "qkv_colwise": Style(Side.OUT, blocks=3),
    "embedding_rowwise": _COLUMN,
    "moe_tp_experts": Style(Side.NONE, experts=True),
    "replicate": _WHOLE,
    # What is gathered when needed needs no style of its own here: these names mean the same as those above.
    "colwise_rep": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "rowwise_rep": _ROW,
    "rowwise_split_input": _ROW,
    "sequence_parallel": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
}


def style(name: object, where: str) -> Style:
    """The style of a name in a plan.

    Raises:
        ConfigurationError: there is none.
    """
    if not isinstance(name, str) or name not in STYLES:
        raise ConfigurationError(
            f'tp_plan["{where}"] = {name!r} is not a style; use one of {", ".join(sorted(STYLES))}'
        )
    return STYLES[name]
