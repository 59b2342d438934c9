"""Statistics that know how they reduce, and the report of an update."""
