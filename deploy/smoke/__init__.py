"""The smoke test of a fleet in containers: it plays the trainer, runs a whole cycle over HTTP, and exits with 0 or says
why. `python -m deploy.smoke PROFILE`, docs/containers.md."""
