"""Models for the tests of tensor parallelism."""
