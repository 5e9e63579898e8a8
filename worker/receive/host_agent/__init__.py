"""The host agent: a process beside the ranks of one engine on one host, which receives, verifies, stages and keeps
weights for all of them. The ranks map what it has staged, and load it."""
