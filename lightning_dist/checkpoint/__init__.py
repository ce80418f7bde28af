"""Writing and reading what was trained. "full" is the format that any PyTorch program reads."""

from lightning_dist.checkpoint.full import full_optimizer_state, full_state_dict, local_optimizer_state

__all__ = ["full_optimizer_state", "full_state_dict", "local_optimizer_state"]
