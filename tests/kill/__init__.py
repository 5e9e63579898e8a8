"""Real processes, killed and stopped at each boundary of an update. `test_kill_matrix.py` runs the cases."""
