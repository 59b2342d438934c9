"""A server in OpenAI's and Anthropic's forms whose calls become a trajectory, token for token."""
