"""Plays one order to one trajectory."""

from actors.loop.rollout import Rollout
from actors.loop.services import Services

__all__ = ["Rollout", "Services"]
