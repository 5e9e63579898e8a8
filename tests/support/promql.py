"""Finds the metrics and labels that an expression of PromQL uses. It knows the part of PromQL that our rules and
dashboards need, and refuses everything else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s+|(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<sign>==|!=|>=|<=|=~|!~|[-+*/<>=(){},])""",
    re.VERBOSE,
)
AGGREGATIONS = frozenset({"sum", "max", "min", "avg", "count"})
FUNCTIONS = frozenset({"rate", "increase", "histogram_quantile"})
COUNTED = frozenset({"rate", "increase"})
"""Functions of a counter, over a range."""
OPERATORS = frozenset({"and", "or", "unless", "+", "-", "*", "/", "==", "!=", ">", "<", ">=", "<="})


@dataclass
class Selector:
    """One metric in an expression."""

    metric: str
    matchers: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Label → the operator and the value."""
    function: str = ""
    """The function that takes it over a range. Empty: it has no range."""


@dataclass
class Expression:
    """The parts of an expression."""

    selectors: list[Selector]
    groupings: set[str]
    """The labels by which it is grouped."""


def parse(text: str) -> Expression:
    """Raises ValueError for what this parser does not know."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"at {text[at : at + 20]!r}")
        if match.lastgroup is not None:
            tokens.append((match.lastgroup, match[0]))
        at = match.end()
    parser = _Parser(tokens)
    parser.comparison()
    if parser.tokens:
        raise ValueError(f"{parser.tokens[0][1]!r} is left over")
    return parser.found


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.found = Expression([], set())

    def comparison(self) -> None:
        """Reads operands with operators between them. Precedence does not matter here."""
        self.operand()
        while self.peek() in OPERATORS:
            self.take()
            self.operand()

    def operand(self) -> None:
        kind, text = self.take()
        if kind == "number":
            return
        if text == "(":
            self.comparison()
            self.expect(")")
        elif kind != "name":
            raise ValueError(f"{text!r} is no operand")
        elif text in AGGREGATIONS:
            self.aggregation()
        elif self.peek() == "(":
            self.function(text)
        else:
            self.selector(text, "")

    def aggregation(self) -> None:
        if self.peek() == "by":
            self.take()
            self.expect("(")
            while self.peek() != ")":
                kind, label = self.take()
                if kind != "name":
                    raise ValueError(f"{label!r} is no label")
                self.found.groupings.add(label)
                if self.peek() == ",":
                    self.take()
            self.expect(")")
        self.expect("(")
        self.comparison()
        self.expect(")")

    def function(self, name: str) -> None:
        if name not in FUNCTIONS:
            raise ValueError(f"{name} is no function")
        self.expect("(")
        if name in COUNTED:
            self.selector(self.take()[1], name)
        else:
            self.operand()
            self.expect(",")
            self.comparison()
        self.expect(")")

    def selector(self, metric: str, function: str) -> None:
        one = Selector(metric, function=function)
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                (kind, label), (_, operator), (value_kind, value) = self.take(), self.take(), self.take()
                if (kind, value_kind) != ("name", "text") or operator not in ("=", "!=", "=~", "!~"):
                    raise ValueError(f"{label}{operator}{value} is no matcher")
                one.matchers[label] = (operator, value[1:-1])
                if self.peek() == ",":
                    self.take()
            self.expect("}")
        has_range = bool(self.tokens) and self.tokens[0][0] == "range"
        if has_range != bool(function):
            raise ValueError(f"{metric} has a range without rate, or rate without a range")
        if function:
            self.take()
        self.found.selectors.append(one)

    def peek(self) -> str:
        return self.tokens[0][1] if self.tokens else ""

    def take(self) -> tuple[str, str]:
        if not self.tokens:
            raise ValueError("it ends too early")
        return self.tokens.pop(0)

    def expect(self, text: str) -> None:
        if self.take()[1] != text:
            raise ValueError(f"{text!r} is missing")
