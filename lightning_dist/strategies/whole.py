"""A module that was divided remembers how, so that a later Trainer with another strategy can make it whole again."""

from collections.abc import Callable

from lightning.pytorch import LightningModule

UNDO = "_lightning_dist_undo"


def remember(module: LightningModule, undo: Callable[[LightningModule], object]) -> None:
    """Note how to undo what was done to `module`. A copy of the module has a copy of the note (`copy.deepcopy`)."""
    vars(module).setdefault(UNDO, []).append(undo)


def make_whole(module: LightningModule) -> None:
    """Undo what was done, the last first; parameters must show whole values. All ranks."""
    for undo in reversed(vars(module).pop(UNDO, [])):
        undo(module)
