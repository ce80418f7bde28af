"""`Trainer(strategy="pp")`: whatever holds under ZeRO holds here."""

from __future__ import annotations

import pytest
import torch

from lightning_dist import PipelineParallelStrategy
from tests.harness import ranks
from tests.pp.lit import Lit, fit_both
from tests.tp.lit import assert_same


@ranks(2, 4)
@pytest.mark.parametrize("name", ["hand_written", "llama_tied", "gpt2", "bert", "mixtral"])
def test_fit_equals_one_process(name: str) -> None:
    strategy = PipelineParallelStrategy(num_microbatches=4)
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert ours.global_step == theirs.global_step == 4
    assert assert_same(ours, module, alone) > 10
    assert set(theirs.callback_metrics) <= set(ours.callback_metrics)
    for key, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[key], value, rtol=1e-6, atol=1e-9)
