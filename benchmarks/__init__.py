"""Measurements of lightning_dist beside the systems people use today; see README.md for the protocol."""
