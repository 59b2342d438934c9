"""Inference engines as the actor sees them: a client for vLLM's routes, a sticky router, a stub for tests."""
