"""The worker's metrics, which `rl-plane worker --metrics-port` shows. docs/metrics.md lists them."""
