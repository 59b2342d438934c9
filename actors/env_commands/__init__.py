"""The commands of ``afterplay env``: list, show, play, demonstrate, new."""
