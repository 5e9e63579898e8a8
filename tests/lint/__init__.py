"""Checks of the repository's own language and names, run by `make lint`."""
