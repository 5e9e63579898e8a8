"""Lets the loops of SGLang's CPU build wait without a core of their own."""

from __future__ import annotations

from typing import Any

IDLE_MS = 1000
"""Milliseconds between two signs of life of an idle controller to its watchdog."""


def dispatch_politely(event_loop: Any, controller: Any) -> None:
    """Replaces the data parallel controller's loop, which polls without a pause: on two cores the replicas have to
    share one with it."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    while True:
        controller.soft_watchdog.feed()
        if poller.poll(IDLE_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))


def sleep_while_paused(nothing: None, scheduler: Any) -> None:
    """A hook after each pass of a paused scheduler's loop: waits for the next message, as an idle scheduler does.

    SGLang's own loop polls without a pause, and keeps a core busy that the trainer needs for the next version.
    """
    scheduler.maybe_sleep_on_idle()
