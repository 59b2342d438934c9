"""Rows of data sets as tasks, and which task is next."""
