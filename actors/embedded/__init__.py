"""The embedded engine: the routes of vLLM that Afterplay uses, served by transformers' continuous batching.

For laptops, tests and tiny models, on CPU or GPU. ``python -m actors.embedded --model DIR --port N``.
"""
