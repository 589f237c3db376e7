"""The runtime reader of schedules: runs one rank's actions."""

from hetero_megatron.pipeline.executor import PipelineExecutor

__all__ = ["PipelineExecutor"]
