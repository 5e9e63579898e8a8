"""The sockets of SGLang's scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.engines.sglang.plugin import send_in_order

pytestmark = [
    pytest.mark.engines("sglang"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]

TOKENS = 5000
"""More than the queue of one socket holds, so that the sockets' own threads decide when each message leaves."""


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_tokens_and_the_answer_to_a_call_leave_a_scheduler_in_order(tmp_path: Path, is_rank_zero: bool) -> None:
    import zmq
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    addresses = {
        name: f"ipc://{tmp_path / name}"
        for name in ("scheduler_input_ipc_name", "rpc_ipc_name", "tokenizer_ipc_name")
    }
    channels = send_in_order(
        SchedulerIpcChannels.create(
            port_args=SimpleNamespace(**addresses),
            is_rank_zero=is_rank_zero,
            skip_tokenizer_init=True,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
    )
    tokens, answers = channels.send_to_detokenizer, channels.send_to_tokenizer
    assert tokens.socket is answers.socket, "ZeroMQ keeps the order of one socket alone"
    if not is_rank_zero:
        assert tokens.socket is None
        return
    assert send_in_order(channels) is channels, "hooks that are applied twice must not close the one socket"
    try:
        with zmq.Context() as context, context.socket(zmq.PULL) as tokenizer:
            tokenizer.setsockopt(zmq.RCVTIMEO, 30_000)
            tokenizer.bind(addresses["tokenizer_ipc_name"])
            for number in range(TOKENS):
                tokens.socket.send(b"%d" % number)
            answers.socket.send(b"paused")
            received = [tokenizer.recv() for _ in range(TOKENS + 1)]
    finally:
        for one in (channels.recv_from_tokenizer, channels.recv_from_rpc, tokens.socket):
            one.close(linger=0)
    assert received == [b"%d" % number for number in range(TOKENS)] + [b"paused"]
