"""Random numbers of a step: whoever makes the same draw gets the same numbers.

Every stage runs the user's step, so what is drawn in it outside of the layers is drawn on several ranks: a noise that
stage 0 adds to its input is the noise that the last stage takes the loss against. A micro-batch therefore has a number
of its own, the same on all ranks, and its streams begin anew where stages may have drawn more or less::

    stream 0    noise = randn_like(batch)     drawn by every stage
                words(ids)                    computed by stage 0 only; if it draws, a new stream begins behind it
                dropout(h)                    of a fake: as many numbers are used up (`fakes`)
                layers 0, 1, ...              behind each a new stream begins, whoever computes it

Streams begin behind what draws, not ahead of it: so the state that an activation checkpoint saves ahead of a layer is
the one that the layer drew from. They are those of torch, of numpy and of `random`, and of the generators that the user
keeps in attributes of the modules that all stages run.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, nn

_BETWEEN_STREAMS = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Draws:
    """The streams of one micro-batch: generators, and what each was seeded with for its first stream."""

    seeds: tuple[tuple[Generator, int], ...]

    def begin(self, stream: int, *, plain: bool = True) -> None:
        """Begin a stream.

        Args:
            plain: of numpy and `random`, too, which takes longer.
        """
        ahead = stream * _BETWEEN_STREAMS
        for generator, seed in self.seeds:
            generator.manual_seed((seed + ahead) % 2**63)
        if plain:
            first = self.seeds[0][1] + ahead
            random.seed(first % 2**63)
            np.random.seed(first % 2**32)


def draws_of_step(generators: list[Generator], number: int) -> list[Draws]:
    """For each micro-batch of a step; draws one number from each generator, so that a seed of the user's tells."""
    first, *own = generators
    bases = [_a_number(first)]
    bases += [bases[0] if _is_default(generator) else _a_number(generator) for generator in own]
    return [
        Draws(tuple((generator, base + part) for generator, base in zip(generators, bases, strict=True)))
        for part in range(number)
    ]


def generators_of(parts: Iterable[nn.Module]) -> list[Generator]:
    """The default ones, that of the CPU first, and those in attributes of these modules."""
    kept = (value for part in parts for value in vars(part).values() if type(value) is Generator)
    return [torch.default_generator, *_of_device(), *dict.fromkeys(kept)]


@contextmanager
def same_numbers_after(generators: list[Generator]) -> Iterator[None]:
    """Random numbers go on after the block as if it had drawn none: the same on all stages."""
    states, plain = [generator.get_state() for generator in generators], random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(plain)
        np.random.set_state(of_numpy)


class Watch:
    """Whether anything was drawn since it was made, by torch or, `plain`, by numpy or `random`."""

    def __init__(self, generators: list[Generator]) -> None:
        self.generators = generators
        self.states, self.states_of_plain = self._states(), self._states_of_plain()

    def _states(self) -> list[bytes]:
        return [bytes(generator.get_state().numpy()) for generator in self.generators]

    @staticmethod
    def _states_of_plain() -> tuple[object, ...]:
        kind, keys, *rest = np.random.get_state()
        return random.getstate(), kind, bytes(keys), *rest  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """Whether numpy or `random` has drawn."""
        return self._states_of_plain() != self.states_of_plain

    @property
    def any(self) -> bool:
        """Whether anything has."""
        return self._states() != self.states or self.plain


def _of_device() -> list[Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


def _is_default(generator: Generator) -> bool:
    return generator in _of_device()


def _a_number(generator: Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
