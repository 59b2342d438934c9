"""Publication of weights to the engines."""
