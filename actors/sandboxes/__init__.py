"""Sandboxes: places for programs of a policy, with limits on what they see, use and reach."""
