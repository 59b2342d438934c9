"""Messages to token ids and back, without re-tokenising what was sampled."""
