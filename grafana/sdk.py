"""The dashboard SDK, imported once, without the warning that it gives about its own import."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import heatmap as heatmap_models
    from grafana_foundation_sdk.models import prometheus as prometheus_models

__all__ = [
    "Builder",
    "JSONEncoder",
    "builders",
    "common",
    "common_models",
    "heatmap",
    "heatmap_models",
    "models",
    "prometheus",
    "prometheus_models",
    "stat",
    "timeseries",
]
