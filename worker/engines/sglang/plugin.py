"""The plugin that SGLang loads in each of its processes (entry point `sglang.srt.plugins`). It acts only for our
engines."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from typing import Any

MARK = "RL_PLANE_SGLANG"
"""An environment variable of the processes that the adapter starts: what they must know, as JSON."""

METHOD = "rl_plane"
"""The scheduler's method that the adapter's remote calls name."""


BACKLOG = 1024
"""Connections to the ranks' store that may wait. All ranks come at once."""


def register() -> None:
    told = os.environ.get(MARK)
    if told is None:
        return
    if json.loads(told)["worker"] != os.getpid():
        from worker.engines.common.shared_names import make_no_semaphore
        from worker.receive.rank_agents.agent_server import belong_to_worker

        belong_to_worker()
        make_no_semaphore()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from worker.engines.common.shared_names import delete_name_of_ring
    from worker.engines.sglang.controller import answer_by_agent, end_with_replica, open_loads
    from worker.engines.sglang.flushing import abort_at_once, flush_at_once
    from worker.engines.sglang.logits import sample_with_raw_logprobs, tell, telling
    from worker.engines.sglang.pipeline import (
        choose_next_batch,
        idle_while_paused,
        pause_all_batches,
        with_waiting_batches,
    )
    from worker.engines.sglang.text_form import accept_in_time, continue_grammar, with_grammars
    from worker.engines.sglang.top_k_first import filter_top_k_first, sample_top_k_first

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.__init__", _serve_rank, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.handle_rpc_request", answer_by_agent, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.get_next_batch_to_run", choose_next_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.pause_generation", pause_all_batches, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.flush_cache", flush_at_once, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.abort_request", abort_at_once, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", idle_while_paused, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._collect_inflight_batches", with_waiting_batches, HookType.AFTER)
    HookRegistry.register(
        f"{scheduler}._record_scheduler_state_for_paused_engine", _wait_while_paused, HookType.AFTER
    )
    channels = "sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels.create"
    HookRegistry.register(channels, send_in_order, HookType.AFTER)
    controller = "sglang.srt.managers.data_parallel_controller.DataParallelController"
    HookRegistry.register(f"{controller}.launch_tensor_parallel_group", end_with_replica, HookType.AROUND)
    HookRegistry.register(f"{controller}.__init__", open_loads, HookType.AFTER)
    queue = "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue"
    HookRegistry.register(f"{queue}.wait_until_ready", delete_name_of_ring, HookType.AROUND)
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", _listen_there, HookType.AROUND)
    sampler = "sglang.srt.layers.sampler"
    HookRegistry.register(f"{sampler}.Sampler.forward", sample_with_raw_logprobs, HookType.AROUND)
    in_torch = f"{sampler}.top_k_top_p_min_p_sampling_from_probs_torch"
    HookRegistry.register(in_torch, sample_top_k_first, HookType.AROUND)
    grammars = "sglang.srt.constrained.grammar_manager.GrammarManager"
    HookRegistry.register(f"{grammars}.process_req_with_grammar", with_grammars, HookType.AROUND)
    accept = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.accept_token"
    HookRegistry.register(accept, accept_in_time, HookType.AROUND)
    HookRegistry.register(f"{grammars}._apply_request_reasoning_config", continue_grammar, HookType.AFTER)
    if json.loads(told)["device"] == "cpu":
        from worker.engines.sglang.patches.idle_controller import dispatch_politely

        HookRegistry.register(f"{controller}.event_loop", dispatch_politely, HookType.AROUND)
        from worker.engines.sglang.patches.seeds import hand_over_seeds, sample_by_seed

        batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
        HookRegistry.register(batch, hand_over_seeds, HookType.AFTER)
        HookRegistry.register(f"{sampler}.multinomial_with_seed", sample_by_seed, HookType.AROUND)
    else:
        HookRegistry.register(f"{sampler}.top_k_top_p_sampling_from_probs", filter_top_k_first, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.get_output_streamer_class", telling, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info", tell, HookType.AROUND
    )


def child_failed(number: int, frame: Any) -> None:
    """Replaces SGLang's handler of SIGQUIT, which ends the process: the adapter notices itself when a child ends."""


def send_in_order(channels: Any, *arguments: Any, **options: Any) -> Any:
    """Makes tokens and the answers to calls leave a scheduler by one socket.

    ZeroMQ keeps the order of messages only within one socket. With SGLang's two sockets, the answer to a pause can
    overtake the last tokens, and these tokens would get the label of the next weights."""
    answers, tokens = channels.send_to_tokenizer.socket, channels.send_to_detokenizer.socket
    if answers is tokens:  # a rank that has no sockets, or a process that applied the hooks twice
        return channels
    answers.close()
    return replace(channels, send_to_tokenizer=channels.send_to_detokenizer)


def _wait_while_paused(_: None, scheduler: Any) -> None:
    """Makes a paused scheduler wait for its next message as an idle one does (`sleep_on_idle`). SGLang's own loop would
    take a core, and the interpreter from the agent's threads, which stage weights.

    SGLang's watchdog ends the engine if the step that it sees here takes too long. A paused engine makes no step."""
    scheduler.cur_batch_for_debug = None
    scheduler.maybe_sleep_on_idle()


def _listen_there(
    make: Any, hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
) -> Any:
    """Makes the store of the engine's own ranks listen at the address that SGLang names, which is 127.0.0.1.

    torch alone would listen at every address of the machine, and its store has no authentication.
    """
    if rank != 0:
        return make(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore

    listener = socket.create_server((hostname, port), backlog=BACKLOG)
    return TCPStore(
        hostname,
        listener.getsockname()[1],
        world_size,
        True,
        timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=use_libuv,
    )


def _serve_rank(build: Any, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """Wraps the scheduler's constructor: adds our agent and our methods."""
    from worker.engines.sglang.logits import Observer
    from worker.engines.sglang.scheduler import Rank

    told = json.loads(os.environ[MARK])
    if told["device"] == "cpu":
        from worker.engines.sglang.patches.cpu_build import do_without_pinned_memory

        do_without_pinned_memory()
    build(scheduler, *arguments, **options)
    scheduler.tp_worker.model_runner.sampling_observer = Observer(told["raw_logprobs"])
    rank = Rank(scheduler, told)
    setattr(scheduler, METHOD, rank.call)
    rank.serve()
