from tests.unit.learner.conftest import _one_thread, kit

__all__ = ["_one_thread", "kit"]
