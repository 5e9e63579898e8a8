"""Switches the spans of a process on, where the setting `otel_endpoint` asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

OTEL = ("otel_endpoint",)


def check_extra(values: Mapping[str, Any]) -> None:
    """Raises ModuleNotFoundError, whose error names the extra, if spans are wanted and can't be made."""
    if values["otel_endpoint"] is not None:
        importlib.import_module("rl_plane._util.otel")


@contextmanager
def spans_of(values: Mapping[str, Any], service: str, instance: str | None = None) -> Iterator[None]:
    """Sends the spans that begin within the block, if the settings ask for it. `instance`: the process's id, if it has
    one."""
    if values["otel_endpoint"] is None:
        yield
        return
    from rl_plane._util.otel import exported_spans  # takes 0.3 s, and needs the extra

    names = {name: values[name] for name in ("namespace", "component")}
    with exported_spans(values["otel_endpoint"], service, instance or "", **names):
        yield
