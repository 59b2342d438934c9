"""Launchers: they place the processes of a plan on machines, find them there and start them again."""
