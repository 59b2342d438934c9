"""New weights to the engines. ``base`` is the contract; ``publisher`` keeps it over any ``WeightLoader``."""

from learner.publisher.base import Publication, Target, WeightLoader, WeightPublisher

__all__ = ["Publication", "Target", "WeightLoader", "WeightPublisher"]
