"""Rollouts and curves for people: page, terminal, plots."""
