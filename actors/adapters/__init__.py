"""Every environment that ships: the built-in games, and thin adapters to environment packages."""
