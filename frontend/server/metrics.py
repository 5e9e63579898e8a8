"""`/metrics`, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from frontend.facade.canary_counts import CanaryCounts

Sample = tuple[Mapping[str, str], float]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def metric(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inner}}} {value:g}" if inner else f"{name} {value:g}")
    return "\n".join(lines) + "\n"


def frontend_metrics(
    *,
    workers: int,
    admitted: int,
    closed: Mapping[str, int],
    canaries: CanaryCounts,
    epoch: int,
    sequence: int | None,
    outcomes: Mapping[str, int],
    in_flight: int,
    lease: bool | None,
    picks: Mapping[str, int],
    moves: Mapping[str, int],
) -> str:
    """`sequence`: of the committed state, None: there is none. `lease`: None when no tokens are delivered here."""
    parts = [
        metric("rl_plane_workers", "gauge", "Workers in the fleet.", [({}, workers)]),
        metric("rl_plane_workers_admitted", "gauge", "Workers that take generation.", [({}, admitted)]),
        metric(
            "rl_plane_workers_closed",
            "gauge",
            "Workers that take no generation, by reason.",
            [({"reason": reason}, count) for reason, count in sorted(closed.items())],
        ),
        metric(
            "rl_plane_canary_failures_total",
            "counter",
            "Workers that failed the numeric canary of an update, by reason.",
            [({"reason": reason}, count) for reason, count in sorted(canaries.failures.items())],
        ),
        metric("rl_plane_membership_epoch", "gauge", "Grows with each join and leave.", [({}, epoch)]),
        metric(
            "rl_plane_generation_requests_total",
            "counter",
            "Generation calls that have ended here, by outcome.",
            [({"outcome": outcome}, count) for outcome, count in sorted(outcomes.items())],
        ),
        metric("rl_plane_generation_in_flight", "gauge", "Choices under way here.", [({}, in_flight)]),
        metric(
            "rl_plane_generation_picks_total",
            "counter",
            "Workers chosen here, by what decided: the request's session, a prefix that is cached, or the load.",
            [({"by": why}, count) for why, count in sorted(picks.items())],
        ),
        metric(
            "rl_plane_generation_moves_total",
            "counter",
            "Choices tried again or continued at another worker, begun anew or cut for their demands.",
            [({"how": how}, count) for how, count in sorted(moves.items())],
        ),
    ]
    if sequence is not None:
        words = "The sequence of what is committed."
        parts.append(metric("rl_plane_committed_sequence", "gauge", words, [({}, sequence)]))
    if canaries.difference is not None:
        words = "The largest difference of a log probability in the canary of the last update."
        parts.append(metric("rl_plane_canary_difference", "gauge", words, [({}, canaries.difference)]))
    if canaries.mismatch_kl is not None:
        words = "The mismatch_kl of the same canary."
        parts.append(metric("rl_plane_canary_mismatch_kl", "gauge", words, [({}, canaries.mismatch_kl)]))
    if lease is not None:
        words = "Whether this frontend may route generation: it has confirmed what is committed."
        parts.append(metric("rl_plane_serving_lease", "gauge", words, [({}, lease)]))
    return "".join(parts)
