"""The client of an inference engine: HTTP, sticky routing, pool, failover."""
