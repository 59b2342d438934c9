"""Tool calls out of sampled text: one pure parser for each format."""
