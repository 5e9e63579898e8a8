"""Checks what a fleet needs from its surroundings."""
