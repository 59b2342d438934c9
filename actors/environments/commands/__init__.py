"""What ``afterplay env`` does: list, show, play, demonstrate, new. :mod:`pipeline.cli.env` is its command line."""
