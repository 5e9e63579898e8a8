"""The options of one worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.protocol.generation import RAW_LOGPROBS, LogprobsMode
from rl_plane.protocol.pooling import Task
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from worker.nodes.node_settings import ONE_HOST, NodeSettings
from worker.runtime.engine_watch import DEFAULT_ENGINE_HANG_S, DEFAULT_LIVENESS_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of `rl-plane worker`."""

    engine: str
    """The name of an entry point of the group `rl_plane.engines`: hf, fake, …"""
    model: Path
    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    credentials: NatsCredentials = NO_CREDENTIALS
    """The files by which the worker connects to NATS."""
    model_name: str | None = None
    """The model's name in requests. None: the last part of the directory."""
    task: Task = "generate"
    """The task of the model: `classify` for a reward model, `embed` for an embedding model."""
    logprobs_mode: LogprobsMode = RAW_LOGPROBS
    """The mode of the logprobs of completions: of the raw logits, or of those divided by the temperature."""
    dtype: str | None = None
    device: str = "auto"
    engine_args: Mapping[str, str] = field(default_factory=dict)
    engine_args_file: Path | None = None
    """A YAML file of engine arguments. An argument in `engine_args` wins over the file."""
    deterministic: bool = False
    """Makes a request's tokens independent of the batch, if the engine can."""
    enable_memory_saver: bool = False
    """Lets memory be released and resumed, if the engine can."""
    weight_roots: tuple[Path, ...] = ()
    """The directories that weights may be read from, besides the model's own directory."""
    weight_urls: tuple[str, ...] = ()
    """The only places that weights may be fetched from by HTTP: prefixes of URLs."""
    instance_id: str | None = None
    """16 hex digits. None: a new id. A supervisor that restarts a worker passes the same id."""
    copies: int = 1
    """Workers in this one process, each with its own connection; more than 1 only for the fake engine."""
    nodes: NodeSettings = ONE_HOST
    """The hosts of the engine, and the one of this process."""
    liveness_timeout_s: float = DEFAULT_LIVENESS_TIMEOUT_S
    """Seconds without a round trip through the engine after which the worker closes, until the next round trip."""
    engine_hang_s: float = DEFAULT_ENGINE_HANG_S
    """Seconds without a round trip, while no op blocks the engine, after which the worker ends."""
    metrics_port: int | None = None
    """The port of `/metrics`. 0: a free port. None: no metrics are served."""
    metrics_host: str = "127.0.0.1"
    """The address of `/metrics`. Without a key it must be a loopback address."""
    metrics_key: str | None = None
    """The key that a scraper sends. None: no key is needed."""
    drain_s: float = 30.0
    """Seconds that running requests may take to end after SIGTERM."""
