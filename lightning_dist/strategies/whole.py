"""A module that was cut remembers how, so that a later Trainer with another strategy can make it whole again."""

from lightning.pytorch import LightningModule

from lightning_dist.strategies.metrics import count_ranks
from lightning_dist.tensor import Report, uncut_module

REPORT = "_lightning_dist_report"


def remember(module: LightningModule, report: Report) -> None:
    """Note how `module` was cut."""
    vars(module)[REPORT] = report


def uncut(module: LightningModule) -> None:
    """Undo a cut, if there was one; parameters must show whole values."""
    report = vars(module).pop(REPORT, None)
    if report is not None:
        uncut_module(module, report)
        count_ranks(module)
