"""How operations act on the parts of a `SplitTensor`: one table from torch functions to rules.

A rule gets what the user's code called and returns what it should see, or `NotImplemented` where this call does not
keep the parts apart; the operation is then computed on the whole.
"""

from lightning_dist.tensor.rules.table import table
from lightning_dist.tensor.split_tensor import RULES

RULES.update(table())

__all__ = ["RULES"]
