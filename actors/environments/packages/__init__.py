"""Adapters to environment packages. Each is thin, imports its package when it is built, and says what to install.

:mod:`actors.environments.packages.catalogue` lists them; docs/ENVIRONMENTS.md describes them."""
