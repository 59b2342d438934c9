"""Acknowledged, bounded messages between processes."""
