"""What `rl-plane worker` is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from worker.runtime.engine_watch import DEFAULT_ENGINE_HANG_S, DEFAULT_LIVENESS_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    engine: str
    """The name of an entry point of the group `rl_plane.engines`: hf, fake, …"""
    model: Path
    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    model_name: str | None = None
    """How requests call the model; None: the directory's last part."""
    dtype: str | None = None
    device: str = "auto"
    engine_args: Mapping[str, str] = field(default_factory=dict)
    engine_args_file: Path | None = None
    """YAML; what `engine_args` say too, they say instead."""
    deterministic: bool = False
    """The same tokens whatever else is in the batch, where the engine can."""
    enable_memory_saver: bool = False
    """Memory can be released and resumed, where the engine can."""
    weight_roots: tuple[Path, ...] = ()
    """The only directories that weights are read from. The model's own directory is always one."""
    instance_id: str | None = None
    """16 hex digits; None: a new one. A supervisor that restarts a worker keeps it."""
    copies: int = 1
    """Workers in this one process, each with its own connection; more than 1 only for the fake engine."""
    liveness_timeout_s: float = DEFAULT_LIVENESS_TIMEOUT_S
    """An engine without a round trip for so long closes the worker, until one comes back."""
    engine_hang_s: float = DEFAULT_ENGINE_HANG_S
    """An engine without a round trip for so long, while no op blocks it, ends the worker."""
    drain_s: float = 30.0
    """How long SIGTERM lets running requests take."""
