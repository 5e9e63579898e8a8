"""Lets the data parallel controller of SGLang's CPU build wait without a core of its own."""

from __future__ import annotations

from typing import Any

IDLE_MS = 1000
"""Milliseconds between two signs of life of an idle controller to its watchdog."""


def dispatch_politely(event_loop: Any, controller: Any) -> None:
    """Replaces the controller's loop, which polls without a pause: on two cores the replicas have to share one with
    it."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    while True:
        controller.soft_watchdog.feed()
        if poller.poll(IDLE_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
