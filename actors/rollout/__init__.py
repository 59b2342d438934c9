"""One order becomes one trajectory: agent loops, limits, prompts, failure classes."""
