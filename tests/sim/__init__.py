"""A deterministic simulation of a whole fleet: the real workers, coordinators and frontends, on a simulated NATS, in
virtual time. A seed decides every delay, loss and crash; the same seed gives the same run. `python -m tests.sim`.
"""
