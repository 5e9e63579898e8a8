"""Computes what one update of a large model costs in memory, network and time.

`python -m bench.large_plan` prints the table of docs/large-models.md.

Nothing here is measured. The speeds are arguments, and each formula says what it counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

GB = 1e9
BUCKET_BYTES = 32 << 20
"""The bytes that a host must have before it can pass them on."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, the hosts that serve it, and the trainer that feeds them."""

    parameters: float
    bytes_each: float
    """Bytes of one parameter: 2 for bf16, 1 for fp8."""
    hosts: int
    """All hosts that serve the model."""
    ranks: int
    """The ranks of an engine on one host."""
    hosts_per_engine: int = 1
    trainer_links: int = 1
    """The network links of the trainer: the hosts whose ranks are sources."""
    changed: float = 1.0
    """The share of the bytes that travels: 1 for a full version, less for a delta or a partial update."""

    @property
    def nbytes(self) -> float:
        return self.parameters * self.bytes_each


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second."""

    link: float = 50 * GB
    """A host's network, each way: 400 Gbit/s."""
    copy: float = 19.3 * GB
    """One core copies memory. Measured on an AMD EPYC."""
    digest: float = 32.2 * GB
    """One core computes XXH3-128. Measured on the same core."""
    cores: int = 8
    """The cores of a host that copy and hash."""
    device: float = 50 * GB
    """One rank's way from pinned memory to its GPU: PCIe 5.0 x16."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and seconds of one update."""

    staged: float
    """Host memory of each host for the staged version. With `keep_staged` it stays."""
    staged_per_rank: float
    """Host memory of each host if every rank received for itself."""
    sent_star: float
    """Bytes that leave the trainer if every host fetches from it. By `http`: that leave the file server."""
    sent_relay: float
    """Bytes that leave the trainer if hosts pass on what they have."""
    receive_star_s: float
    receive_relay_s: float
    """Seconds until the last host has received everything."""
    verify_s: float
    """Seconds for the copies and the digests on each host. They overlap with the receiving."""
    load_s: float
    """Seconds for which generation stands still while the ranks load."""


def cost(deployment: Deployment, speeds: Speeds) -> Cost:
    """Computes one update."""
    nbytes, hosts = deployment.nbytes, deployment.hosts
    travels = nbytes * deployment.changed
    sources = min(deployment.trainer_links, hosts)
    one = travels / speeds.link
    # A chain: each host passes on a bucket as soon as it has it, so the last host is hosts - 1 buckets late.
    late = (hosts - 1) * min(BUCKET_BYTES, travels) / speeds.link
    engine_ranks = deployment.ranks * deployment.hosts_per_engine
    return Cost(
        staged=nbytes,
        staged_per_rank=nbytes * deployment.ranks,
        sent_star=travels * hosts,
        sent_relay=travels,
        receive_star_s=one * hosts / sources,
        receive_relay_s=min(one * hosts / sources, one + late),
        verify_s=travels * (1 / speeds.copy + 1 / speeds.digest) / speeds.cores,
        load_s=nbytes / engine_ranks / speeds.device,
    )


EXAMPLES = (
    ("8 B, bf16", Deployment(8e9, 2, hosts=8, ranks=1)),
    ("70 B, bf16", Deployment(70e9, 2, hosts=8, ranks=8)),
    ("235 B, bf16", Deployment(235e9, 2, hosts=16, ranks=8)),
    ("671 B, fp8", Deployment(671e9, 1, hosts=32, ranks=8, hosts_per_engine=2)),
    ("1 T, fp8", Deployment(1e12, 1, hosts=64, ranks=8, hosts_per_engine=2)),
    ("1 T, fp8, 16 trainer links", Deployment(1e12, 1, hosts=64, ranks=8, hosts_per_engine=2, trainer_links=16)),
    ("1 T, fp8, a delta of 2 %", Deployment(1e12, 1, hosts=64, ranks=8, hosts_per_engine=2, changed=0.02)),
)
HEAD = (
    "model",
    "hosts × ranks",
    "host memory",
    "if each rank received",
    "from the trainer, star",
    "relay",
    "time, star",
    "relay",
    "copy and digest",
    "load",
)


def table(speeds: Speeds, examples: Sequence[tuple[str, Deployment]] = EXAMPLES) -> str:
    """The examples as a Markdown table."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for name, deployment in examples:
        found = cost(deployment, speeds)
        lines.append(
            (
                name,
                f"{deployment.hosts} × {deployment.ranks}",
                _size(found.staged),
                _size(found.staged_per_rank),
                _size(found.sent_star),
                _size(found.sent_relay),
                _time(found.receive_star_s),
                _time(found.receive_relay_s),
                _time(found.verify_s),
                _time(found.load_s),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e12:.3g} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g} GB"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.large_plan", description=__doc__)
    parser.add_argument("--link-gbit", type=float, default=400, help="a host's network, each way [400]")
    parser.add_argument("--cores", type=int, default=8, help="cores of a host that copy and hash [8]")
    parser.add_argument("--device-gb", type=float, default=50, help="GB/s from host memory to one GPU [50]")
    arguments = parser.parse_args()
    link, device = arguments.link_gbit * GB / 8, arguments.device_gb * GB
    print(table(Speeds(link=link, cores=arguments.cores, device=device)))


if __name__ == "__main__":
    main()
