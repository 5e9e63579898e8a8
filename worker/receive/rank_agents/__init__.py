"""Reaches the receivers in an engine's rank processes: an agent runs in each rank, a client in the worker."""
