"""An OpenAI-compatible server whose calls become a trajectory, token for token."""
