"""ZeRO sharding: stages 0 to 3 from one table, usable in a plain PyTorch loop."""

from lightning_dist.zero.engine import ZeroEngine
from lightning_dist.zero.slot import Piece

__all__ = ["Piece", "ZeroEngine"]
