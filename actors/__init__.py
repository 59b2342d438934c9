"""Actors: agent loops, engine client, sticky routing, rendering, environments."""
