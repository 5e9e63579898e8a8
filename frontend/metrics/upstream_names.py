"""The engines' load by the names of vLLM's and SGLang's own metrics, for trainers and dashboards that know these.

Each engine has a series of its own, named by its worker's instance id. A number that the engine does not tell has no
sample. The table of docs/metrics.md lists the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.routing.worker_work import Engine

Values = Iterable[tuple[Engine, float | None]]

OF_VLLM = frozenset({"vllm", "prime-rl"})
"""The dialects whose clients read vLLM's names."""
OF_SGLANG = frozenset({"sglang"})


def upstream_families(dialects: Iterable[str], engines: Sequence[Engine]) -> Iterable[Metric]:
    """The families of all dialects that are switched on."""
    on = set(dialects)
    if on & OF_VLLM:
        yield from _vllm(engines)
    if on & OF_SGLANG:
        yield from _sglang(engines)


def _vllm(engines: Sequence[Engine]) -> Iterable[Metric]:
    label = "engine"
    yield from _both(
        "vllm", label, engines, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    words = "Requests that have lost their KV to others."
    yield _counter("vllm:num_preemptions", words, label, ((one, one.work.preemptions) for one in engines))
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The room of the KV cache.", labels=[label, "kv_cache_size_tokens"]
    )
    for one in engines:
        if (kv_tokens := _kv_tokens(one)) is not None:
            info.add_metric([one.member.instance_id, str(kv_tokens)], 1)
    yield info


def _sglang(engines: Sequence[Engine]) -> Iterable[Metric]:
    label = "instance_id"
    yield from _both("sglang", label, engines, ("num_running_reqs", "num_queue_reqs", "token_usage"))
    words = "The tokens that the KV cache has room for."
    yield _gauge("sglang:max_total_num_tokens", words, label, ((one, _kv_tokens(one)) for one in engines))
    words = "Tokens that the engine makes in a second."
    yield _gauge("sglang:gen_throughput", words, label, ((one, one.work.tokens_per_s) for one in engines))


def _both(engine: str, label: str, engines: Sequence[Engine], names: tuple[str, str, str]) -> Iterable[Metric]:
    """The families that both have. `names`: of the running requests, the waiting ones, and the KV cache's use."""
    running, waiting, usage = (f"{engine}:{name}" for name in names)
    words = "Requests in the engine's batch."
    yield _gauge(running, words, label, ((one, one.work.running) for one in engines))
    words = "Requests that wait for a place in the engine's batch."
    yield _gauge(waiting, words, label, ((one, one.work.waiting) for one in engines))
    words = "The part of the KV cache that is in use, from 0 to 1."
    yield _gauge(usage, words, label, ((one, one.work.kv_usage) for one in engines))
    words = "Prompt tokens of the requests that have begun."
    yield _counter(f"{engine}:prompt_tokens", words, label, ((one, one.work.prompt_tokens) for one in engines))
    words = "Tokens that the engine has made."
    yield _counter(f"{engine}:generation_tokens", words, label, ((one, one.work.tokens_made) for one in engines))


def _kv_tokens(engine: Engine) -> int | None:
    """The tokens that the KV cache has room for. None: the engine does not report it."""
    found = engine.member.info.get("kv_tokens")
    return found if isinstance(found, int) else None


def _gauge(name: str, words: str, label: str, values: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, words, labels=["model_name", label]), values)


def _counter(name: str, words: str, label: str, values: Values) -> Metric:
    return _filled(CounterMetricFamily(name, words, labels=["model_name", label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for engine, value in values:
        if value is not None:
            member = engine.member
            family.add_metric([str(member.info.get("model", "")), member.instance_id], value)
    return family
