"""The real SmolLM2-135M (9 heads, 3 key-value heads, tied words) on three ranks: the loss of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.comm import Mesh
from lightning_dist.core.layout import Layout
from lightning_dist.tensor import cut_module
from tests.harness import rank, ranks
from tests.smollm2 import from_package, needs_smollm2

pytestmark = [pytest.mark.slow, needs_smollm2]


def build() -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(**from_package(), dtype=torch.float32)
    return model


@ranks(3, timeout=500)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_three_ranks_give_the_loss_of_one_process(sequence_parallel: bool) -> None:
    module = build()
    ids = torch.randint(0, 40_000, (2, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = module(input_ids=ids, labels=ids).loss if rank() == 0 else None
    mesh = Mesh.from_world(Layout(tp=3))
    report = cut_module(module, mesh.tp, sequence_parallel=sequence_parallel)
    assert not report.whole
    loss = module(input_ids=ids, labels=ids).loss
    loss.backward()
    whole = mesh.tp.broadcast((torch.zeros(()) if want is None else want).view(1), purpose="test")
    torch.testing.assert_close(loss.detach().view(1), whole, rtol=1e-5, atol=0)
    held = sum(p.untyped_storage().nbytes() for p in map(_piece, module.parameters()))
    assert held < 4 * 134.6e6 / 3 * 1.02  # norms are whole


def _piece(parameter: nn.Parameter) -> torch.Tensor:
    from lightning_dist.params.questions import without_answers

    return without_answers(parameter).detach()
