"""Rows of data sets as tasks, and the choice of the next task."""
