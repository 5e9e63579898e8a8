"""Checks of the repository's own language, names and patches, run by `make lint`."""
