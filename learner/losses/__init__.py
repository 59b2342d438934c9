"""Policy losses, corrections and KL: one pure function each, and one entry in the registry."""
