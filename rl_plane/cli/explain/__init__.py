"""Says why a fleet, a worker, an update or a request does not go on, and what to do."""
