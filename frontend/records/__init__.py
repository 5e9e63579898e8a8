"""Rollout records: `rl-plane frontend --record DIR` keeps each completion. docs/records.md explains them."""
