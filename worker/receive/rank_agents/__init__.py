"""Reaching the receivers in other processes: an agent in each rank of an engine, a client in the worker."""
