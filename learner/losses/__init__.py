"""Losses over sampled tokens."""
