"""Models and helpers for tests of the pipeline."""
