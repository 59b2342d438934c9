"""Rollouts kept for people to look at: a bounded sample of what was trained, and of what failed.

The replay stage frees a trajectory once it is trained, and the learner forgets what it saw at each token. What
``afterplay show`` needs of both is appended to small files in ``runs/NAME/traces`` (:mod:`pipeline.traces.file`).
"""

from pipeline.traces.file import Trace, TraceEntry, TraceWriter, scan_traces, trace_files
from pipeline.traces.values import Flag, SeenTokens

__all__ = ["Flag", "SeenTokens", "Trace", "TraceEntry", "TraceWriter", "scan_traces", "trace_files"]
