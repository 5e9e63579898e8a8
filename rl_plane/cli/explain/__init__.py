"""Says why a fleet, a worker, an update or a request makes no progress, and what to do."""
