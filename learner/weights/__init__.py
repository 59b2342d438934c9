"""Published weights on their way to the engines."""
