"""Remembers why this worker lacks a transport that is installed, for people who ask."""

from __future__ import annotations

LACKING: dict[str, str] = {}
"""Transport → the reason, as this process or its host agent found when it made its transports. One process has one
engine, or several equal ones, so one table is enough."""
