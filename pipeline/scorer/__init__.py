"""Rewards: environment scores, graders, user functions, judges and reward models."""
