"""Parses each Python file once for all checks."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)
