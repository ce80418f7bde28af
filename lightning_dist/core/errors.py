"""The errors that people meet, each with its cause and its remedy in the message.

One base class lets a caller catch whatever the library refuses; the subclasses also inherit the built-in
error that a reader would expect (a wrong argument is a `ValueError`), so ordinary handlers work too.
"""

import sys

MIXED_IMPORTS = (
    "lightning_dist works with `import lightning as L` (lightning.pytorch); `pytorch_lightning` is another package "
    "with classes of its own. Use L.Trainer and L.LightningModule everywhere in place of pytorch_lightning's"
)


class LightningDistError(Exception):
    """Base of all errors that the library raises on purpose."""


class ConfigurationError(LightningDistError, ValueError):
    """An argument, a name or a combination that cannot work; raised at construction or setup on every rank."""


class UnsupportedModelError(ConfigurationError):
    """The module holds something that cannot be sharded; the message names it."""


class UnsupportedOptimizerError(ConfigurationError):
    """The optimizer is not elementwise, so updating flat pieces would silently be another optimizer."""


class ReleasedParameterError(LightningDistError, RuntimeError):
    """A parameter was read while its values rest sharded on all ranks."""


class ShardedGradientError(LightningDistError, RuntimeError):
    """A gradient was read where only its shard exists."""


class RankMismatchError(LightningDistError, RuntimeError):
    """Ranks wait in different places: going on would hang or mix up numbers, so all of them stop."""


class NonFiniteLossError(LightningDistError, RuntimeError):
    """A rank computed a loss that is NaN or infinite."""


class PeerLostError(LightningDistError, RuntimeError):
    """Another rank failed or died; this rank stops because of it."""


def mixed_imports_hint() -> str:
    """What to say beside one of our objects where both packages of Lightning are in use, else nothing."""
    return f" [{MIXED_IMPORTS}]" if "pytorch_lightning" in sys.modules else ""
