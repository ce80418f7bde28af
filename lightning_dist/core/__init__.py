"""Ranks, shards, stages and errors: plain Python that every other floor speaks in."""
