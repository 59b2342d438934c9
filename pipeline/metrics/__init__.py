"""Every Prometheus metric. The only package that imports ``prometheus_client``."""
