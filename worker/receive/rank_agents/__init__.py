"""Reaches the rank processes of an engine and its host agent: an agent answers calls in each, a client asks them."""
