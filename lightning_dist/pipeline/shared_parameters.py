"""Parameters that several stages hold: each stage has the gradient of its own use, and the gradient is their sum.

Tied words are used by the first stage and by the last one. After a step each holder sends its part to the others and
adds all of them up in the order of ranks, so that all get the same bits and stay equal under the same update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.comm.mesh import Axis
from lightning_dist.core.shard import Home, home_of
from lightning_dist.params.questions import shape_of_piece


@contextmanager
def summed_over_homes(parameters: Sequence[nn.Parameter], axis: Axis) -> Iterator[None]:
    """What the block adds to the parameters' gradients is the sum of what it adds on all of their holders.

    Collective among the holders at the end of the block. A gradient that no holder has stays None.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    _sum(parameters, axis)
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _sum(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    for ranks, group in _by_home(parameters, axis).items():
        peers = [rank for rank in ranks if rank != axis.rank]
        mail = axis.mail
        assert mail is not None
        there = [parameter.grad is not None for parameter in group]
        mine = [_gradient(parameter) for parameter in group]
        for peer in peers:
            mail.send_object(there, peer)
            mail.send(mine, peer, channel="forward", purpose="shared parameters")
        letters = {peer: mail.post(mine, peer, channel="forward") for peer in peers}
        anywhere = list(there)
        for peer in peers:
            said = mail.receive_object(peer)
            assert isinstance(said, list)
            anywhere = [one or other for one, other in zip(anywhere, said, strict=True)]
        parts = {axis.rank: mine, **{peer: letter.wait() for peer, letter in letters.items()}}
        for index, parameter in enumerate(group):
            if anywhere[index]:
                total = parts[ranks[0]][index].clone()
                for rank in ranks[1:]:
                    total += parts[rank][index]
                parameter.grad = total


def _by_home(parameters: Sequence[nn.Parameter], axis: Axis) -> dict[tuple[int, ...], list[nn.Parameter]]:
    everyone = Home(tuple(range(axis.size)), axis.rank)
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((home_of(parameter) or everyone).ranks, []).append(parameter)
    return groups


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is not None:
        return parameter.grad.detach()
    return torch.zeros(shape_of_piece(parameter), dtype=parameter.dtype, device=parameter.device)
