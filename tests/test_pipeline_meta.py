"""Modules built on the meta device, in a pipeline: what a rank does not hold is never made."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_dist import PipelineParallelStrategy
from lightning_dist.engine import placement
from lightning_dist.pipeline.absent import AbsentParameter
from tests.harness import ranks, world_size
from tests.lit import trainer_on_ranks
from tests.pp.lit import Lit, texts
from tests.pp.models import CASES
from tests.tp.lit import whole_weights


def in_float64(name: str) -> nn.Module:
    """Drawn in float64, in which a late model is drawn too."""
    torch.set_default_dtype(torch.float64)
    try:
        return CASES[name].make()
    finally:
        torch.set_default_dtype(torch.float32)


class Late(Lit):
    """Makes its model when it is told to, in no memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name, self.model = name, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = in_float64(self.name)


@ranks(2, 4)
@pytest.mark.parametrize("name", ["qwen2", "llama_tied", "gpt2"])
def test_a_late_model_starts_and_trains_as_one_that_was_there(name: str) -> None:
    made: list[int] = []
    empty_like = placement._empty_like

    def counting(tensor: Tensor) -> Tensor:
        made.append(tensor.numel())
        return empty_like(tensor)

    present, late = Lit(name), Late(name)
    torch.manual_seed(11)
    present.model = in_float64(name)
    want: dict[str, Tensor] = {}
    for module in (present, late):
        torch.manual_seed(11)
        trainer = trainer_on_ranks(PipelineParallelStrategy(num_microbatches=2), max_epochs=1)
        with patch.object(placement, "_empty_like", counting):
            trainer.fit(module, texts())
        want = want or whole_weights(trainer, module)
    parameters = sum(parameter.numel() for parameter in late.parameters())
    buffers = sum(buffer.numel() for buffer in late.buffers())
    assert sum(made) - buffers < parameters * (0.9 if world_size() == 2 else 0.6)
    assert sum(isinstance(parameter, AbsentParameter) for parameter in late.parameters()) > 20
    got = whole_weights(trainer, late)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-12)
