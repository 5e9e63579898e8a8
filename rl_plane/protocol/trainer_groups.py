"""Facts about a group that a trainer has formed by itself, which the plane and the receivers both know: the time in
which a worker joins it, and the format in which prime-rl broadcasts there."""

from __future__ import annotations

JOIN_TORCH_S = 120.0
"""The time to join a trainer's own group, in seconds: the trainer comes when it has gathered its own ranks."""
FORM_MARGIN_S = 10.0
"""Seconds beyond the time to form any group, so that torch's own error, which says more, comes first."""

PRIME_RL_FORMAT = "prime-rl"
"""The `format` of an update whose trainer describes the tensors in the group itself, as prime-rl does."""
