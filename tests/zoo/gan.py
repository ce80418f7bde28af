"""Two networks with two optimizers: what manual optimization and `toggle_optimizer` are for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.case import DTYPE, generator

NOISE = 4
SAMPLE = 6
HIDDEN = 16


def make_generator() -> nn.Module:
    """noise (b, 4) -> sample (b, 6)"""
    return nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SAMPLE)).to(DTYPE)


def make_discriminator() -> nn.Module:
    """sample (b, 6) -> logit (b, 1), large where the sample looks real"""
    return nn.Sequential(nn.Linear(SAMPLE, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1)).to(DTYPE)


def batches(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Real samples (size, 6) and noise (size, 4)."""
    draw = generator(seed)
    real = 1.0 + 0.5 * torch.randn(size, SAMPLE, generator=draw, dtype=DTYPE, device="cpu")
    return real, torch.randn(size, NOISE, generator=draw, dtype=DTYPE, device="cpu")


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Mean over the samples; the generator gets no gradient."""
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    """Mean over the samples; its gradient passes through the discriminator."""
    return F.softplus(-discriminator(fake)).mean()
