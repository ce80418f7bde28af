"""`Trainer(strategy="tp")`: whatever holds under ZeRO holds here."""

from __future__ import annotations

import pytest
import torch

from lightning_dist import TensorParallelStrategy
from tests.harness import ranks
from tests.tp.lit import Lit, assert_same, fit_both


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["hand_written", "llama", "gpt2", "bert", "mixtral"])
def test_fit_equals_one_process(name: str, sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(sequence_parallel=sequence_parallel, check_replicas_every=1)
    ours, module, theirs, alone = fit_both(lambda: Lit(name), strategy, max_epochs=2)
    assert ours.global_step == theirs.global_step == 8
    assert assert_same(ours, module, alone) > 10
    for key, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[key], value, rtol=1e-9, atol=1e-12)
