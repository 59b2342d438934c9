"""Evaluation at the replay stage: which held-out tasks are played when, and what came out (docs/EVALUATION.md)."""
