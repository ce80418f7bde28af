"""The pipeline: schedules as data, and the engine that runs them around an unmodified module."""

from lightning_dist.pipeline.engine import PipelineEngine, Result, undivide
from lightning_dist.pipeline.report import PipelineReport

__all__ = ["PipelineEngine", "PipelineReport", "Result", "undivide"]
