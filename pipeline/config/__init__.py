"""One YAML file describes a run; every role reads the same file and takes its section."""

from pipeline.config.run import RunConfig

__all__ = ["RunConfig"]
