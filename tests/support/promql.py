"""Finds the metrics and labels that an expression of PromQL uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as ast

PATTERNS = (ast.MatchOp.Re, ast.MatchOp.NotRe)


@dataclass(frozen=True)
class Selector:
    """One metric in an expression."""

    metric: str
    matchers: dict[str, list[str]]
    """Label → the values that it may have, or may not have."""
    has_range: bool


@dataclass(frozen=True)
class Expression:
    """The parts of an expression."""

    selectors: list[Selector]
    groupings: set[str]
    """The labels by which it is grouped."""


def parse(text: str) -> Expression:
    """Raises ValueError for what is no PromQL. Grafana's `$__rate_interval` is taken for a range."""
    nodes = list(_nodes(ast.parse(text.replace("$__rate_interval", "5m"))))
    ranges = [node.vector_selector for node in nodes if isinstance(node, ast.MatrixSelector)]
    instants = [node for node in nodes if isinstance(node, ast.VectorSelector)]
    return Expression(
        [_selector(one, True) for one in ranges] + [_selector(one, False) for one in instants],
        {
            label
            for node in nodes
            if isinstance(node, ast.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        },
    )


def _selector(node: ast.VectorSelector, has_range: bool) -> Selector:
    matchers = {
        one.name: one.value.split("|") if one.op in PATTERNS else [one.value] for one in node.matchers.matchers
    }
    return Selector(node.name or "", matchers, has_range)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in (getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")):
        if child is not None:
            yield from _nodes(child)
    for argument in getattr(node, "args", ()):
        yield from _nodes(argument)
