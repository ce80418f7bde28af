"""Pipeline parallelism: groups of layers on different ranks, micro-batches flowing through them."""
