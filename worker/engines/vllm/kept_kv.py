"""Requests that keep their KV while the weights change, and prefixes that no other weights may use. It runs in the
process of vLLM's scheduler.

vLLM finds a cached prefix by a hash of its tokens and of a salt. A swap that keeps KV leaves blocks of older weights in
the cache, so it brings a new salt: requests that begin later find only what was computed since.
"""

from __future__ import annotations

import time
from typing import Any

METHOD = "rl_plane_keep_kv"
"""The engine core's method that the adapter calls."""
SALT = "rl_plane_salt"
"""Attribute of the engine core: the salt of requests that begin now."""
OWN_SALT = "rl_plane_own_salt"
"""Attribute of a request: the salt that its caller gave."""


def keep_kv(core: Any, salt: str) -> list[str] | None:
    """A method of vLLM's EngineCore. The engine is paused by `keep`. A request that has made a token keeps its KV. Any
    other request computes all of its KV again. Returns vLLM's ids of the requests that keep their KV. None: it can't
    tell which request holds which KV."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    if scheduler.pause_state != PauseState.PAUSED_ALL:
        raise RuntimeError("requests can keep their KV only while vLLM is paused")
    if scheduler.connector is not None or scheduler.kv_holding_waiting:
        return None  # a connector finds KV in host memory by the hashes that a request began with
    begun = [request for request in scheduler.running if request.num_output_tokens]
    for request in reversed([one for one in scheduler.running if not one.num_output_tokens]):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    setattr(core, SALT, salt)
    for request in scheduler.waiting:
        _salt(request, salt)
    return [request.request_id for request in begun]


def salt_requests() -> None:
    """Gives each request that comes the salt of its time. Call it before vLLM makes an engine core."""
    from vllm.v1.engine.core import EngineCore

    add = EngineCore.add_request

    def add_salted(core: Any, request: Any, *more: Any, **named: Any) -> Any:
        if (salt := getattr(core, SALT, None)) is not None:
            _salt(request, salt)
        return add(core, request, *more, **named)

    EngineCore.add_request = add_salted
    setattr(EngineCore, METHOD, keep_kv)


def _salt(request: Any, salt: str) -> None:
    """Replaces the salt of a request that holds no KV."""
    own = getattr(request, OWN_SALT, request.cache_salt)
    setattr(request, OWN_SALT, own)
    request.cache_salt = f"{salt} {own or ''}"
    request.block_hashes.clear()
    request.update_block_hashes()
