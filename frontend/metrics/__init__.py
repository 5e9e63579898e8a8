"""The frontend's metrics, which `/metrics` shows. docs/metrics.md lists them."""
