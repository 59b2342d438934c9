"""The commands of ``afterplay``."""
