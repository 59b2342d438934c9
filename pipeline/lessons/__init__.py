"""Short texts from finished groups, found again for prompts."""
