"""Reads pages of metrics: the families, and the value of each series."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from tests.conftest import Spawned


def metrics_url(worker: Spawned) -> str:
    """The address of the metrics of a worker that serves them."""
    found = re.search(r"metrics: (http://\S+)", worker.log.read_text())
    assert found is not None, worker.log.read_text()
    return found[1]


def samples(page: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def values(page: str, component: str | None = None) -> dict[str, float]:
    """Each series as Prometheus writes it, `name{label="value"}` with sorted labels, → its value. `component`: without
    the label of this component, and without the series of other ones."""
    found = {}
    for sample in samples(page):
        of = sample.labels.pop("component", None) if component is not None else None
        if of not in (None, component):
            continue
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
        found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def families(page: str) -> dict[str, tuple[str, set[str]]]:
    """The name of each family, as expressions use it → its type and its labels. A histogram has no `le` here. Every
    family on the page has its type, also without a series."""
    found = {}
    for family in text_string_to_metric_families(page):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
    return found
