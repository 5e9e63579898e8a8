"""`rl-plane demo`: a trainer improves a tiny policy while a fleet of real engines rolls it out."""
