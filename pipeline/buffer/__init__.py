"""A stand-alone trajectory buffer: numpy arrays in, uniformly drawn units out. Needs no run."""

from pipeline.buffer.buffer import TrajectoryBuffer
from pipeline.buffer.copies import load
from pipeline.buffer.layout import join_steps
from pipeline.buffer.results import Batch, Statistics

__all__ = ["Batch", "Statistics", "TrajectoryBuffer", "join_steps", "load"]
