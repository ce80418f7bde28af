"""Leaving the world: process groups are taken down before the interpreter is."""

import atexit

import torch.distributed as dist


def leave_at_exit() -> None:
    """To be called before the default group is made here: take all groups down when this process ends.

    Groups that only the end of the interpreter destroys still run their threads then, which can abort the process.
    """
    if not dist.is_initialized():
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_world(group: object) -> bool:
    """Whether a process group is that of all ranks."""
    return dist.is_initialized() and group is dist.group.WORLD
