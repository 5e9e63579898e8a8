"""`/metrics`, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    epoch: int,
    sequence: int | None,
    outcomes: Mapping[str, int],
    in_flight: int,
    lease: bool | None,
    picks: Mapping[str, int],
    moves: Mapping[str, int],
    canary: Mapping[str, Any],
    canary_failures: Mapping[str, int],
) -> str:
    """`sequence`: of the committed state, None: there is none. `canary`: the newest update's, see
    `rl_plane.canary_judge.Settlement.summary`. `canary_failures`: reason → workers. `lease`: None when no tokens are
    delivered here."""
    parts = [
        metric("rl_plane_workers", "gauge", "Workers in the fleet.", [({}, workers)]),
        metric("rl_plane_workers_admitted", "gauge", "Workers that take generation.", [({}, admitted)]),
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
        metric(
            "rl_plane_canary_failures_total",
            "counter",
            "Workers that failed the numeric canary of an update, by reason.",
            [({"reason": why}, count) for why, count in sorted(canary_failures.items())],
        ),
    ]
    for key, words in (
        ("difference", "The largest difference of a log probability in the newest update's numeric canary."),
        ("mismatch_kl", "The divergence that the newest update's numeric canary has measured, in nats."),
    ):
        if key in canary:
            parts.append(metric(f"rl_plane_canary_{key}", "gauge", words, [({}, canary[key])]))
    if sequence is not None:
        words = "The sequence of what is committed."
        parts.append(metric("rl_plane_committed_sequence", "gauge", words, [({}, sequence)]))
    if lease is not None:
        words = "Whether this frontend may route generation: it has confirmed what is committed."
        parts.append(metric("rl_plane_serving_lease", "gauge", words, [({}, lease)]))
    return "".join(parts)
