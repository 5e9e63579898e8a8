"""A fleet of real processes under load, updates and kills, every token checked. `python -m tests.soak` runs it."""
