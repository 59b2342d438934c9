"""The embedded engine: vLLM's routes over transformers' continuous batching."""
