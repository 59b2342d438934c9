"""Dashboards, alert rules and the proof that they work. Not part of the installed distribution."""
