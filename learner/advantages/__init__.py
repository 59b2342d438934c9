"""Advantage estimators: one pure function each, and one entry in the registry."""
