"""The run file: one YAML file describes a run. Every role reads the same file and uses the sections it needs."""

from pipeline.config.run import RunConfig

__all__ = ["RunConfig"]
