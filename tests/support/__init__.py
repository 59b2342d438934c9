"""Simulated peers, in-memory transport and stub engine for tests and benchmarks."""
