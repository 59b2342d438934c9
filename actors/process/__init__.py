"""The actor process."""
