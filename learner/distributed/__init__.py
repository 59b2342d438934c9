"""Ranks, their collectives, and the messages between them."""
