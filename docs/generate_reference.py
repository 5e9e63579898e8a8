"""Writes docs/reference.md from the tables that the code itself runs on: `python docs/generate_reference.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_plane.errors import PlaneError
from rl_plane.protocol import update_requests
from rl_plane.protocol.fleet_ops import FLEET_OPS, Select
from rl_plane.protocol.worker_ops import OPS

TARGET = Path(__file__).with_name("reference.md")

HEAD = """# Reference

<!-- Made by docs/generate_reference.py. -->

This page lists every op of a fleet and of a worker with its fields, and every error.

| what | where the code defines it |
|---|---|
| a fleet's op | [rl_plane/protocol/fleet_ops.py](../rl_plane/protocol/fleet_ops.py) |
| a worker's op | [rl_plane/protocol/worker_ops.py](../rl_plane/protocol/worker_ops.py) |
| an error | [rl_plane/errors.py](../rl_plane/errors.py) |

[worker/README.md](../worker/README.md#one-plain-op) follows one op through the code.
[frontend/README.md](../frontend/README.md#where-to-add-something) lists what a new op needs.

## The fleet's ops

By HTTP at `/v1/rl/…` on port 8002, by one message `{"op": …, "body": {…}}` to `<ns>.<comp>.fleet` on NATS, and
by `RlClient.run(op, body)`: the same bodies, the same replies. `GET /v1/rl/health` says that the frontend runs, and
is the only route that is open when a key is set; with a [dialect](dialects.md) on, `GET /health` is too, and says
that a worker is there.
`GET /v1/rl/events` streams what happens (see operators.md). `GET /v1/rl/about` is about the frontend itself, and
`GET /v1/rl/requests` lists the requests that run through it (see when-it-hangs.md).

Every reply is `{status: "ok", epoch, fingerprint, workers: [{instance_id, incarnation, status, …}], elapsed_s}`,
with a row for each worker. What the ranks of its engine answer for is in the row's `rank_results`, `[{rank, …}]` in
their order (see engines.md). A failure is `{status: "error", error: {code, message, field?, fix?, …}, workers?}`.

Every call may also carry, in its body or its HTTP query:

"""


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "oneOf" in schema:
        return " or ".join(_type(part) for part in schema["oneOf"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _text(field: dict[str, Any]) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


def _table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    rows = []
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", [])
        default = "required" if required else f"`{field.get('default')}`" if "default" in field else ""
        rows.append(f"| `{name}` | {_type(field)} | {default} | {_text(field)} |")
    if not rows:
        return "No fields.\n"
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows]) + "\n"


def _nested(models: list[type[BaseModel]]) -> dict[str, type[BaseModel]]:
    names = {name for model in models for name in model.model_json_schema().get("$defs", {})}
    return {name: getattr(update_requests, name) for name in sorted(names)}


def _errors(kind: type[PlaneError], depth: int = 0) -> list[str]:
    text = " ".join((kind.__doc__ or "").split()) if "__doc__" in kind.__dict__ else ""
    lines = [f"| {'&nbsp;' * 4 * depth}`{kind.__name__}` | `{kind.code}` | {kind.http_status} | {text} |"]
    for child in kind.__subclasses__():
        lines += _errors(child, depth + 1)
    return lines


def reference() -> str:
    parts = [HEAD, _table(Select)]
    for fleet_op in FLEET_OPS.values():
        parts.append(f"\n### {fleet_op.name}\n\n`{fleet_op.method} /v1/rl/{fleet_op.path}`: {fleet_op.doc}\n\n")
        parts.append(_table(fleet_op.own))
    for name, model in _nested([op.own for op in FLEET_OPS.values()]).items():
        parts.append(f"\n### {name}\n\n{_table(model)}")
    parts.append(
        "\n## A worker's ops\n\nOn `<ns>.<comp>.rl` (every worker answers) and `<ns>.<comp>.rl.<instance_id>`. "
        "An op that changes a worker\nneeds the fence of the component's lock and its incarnation: call it by "
        "`RlClient.call` or `call_all`.\n\n| op | changes | time-out | |\n|---|---|---|---|\n"
    )
    for op in OPS.values():
        parts.append(f"| `{op.name}` | {'yes' if op.changes else ''} | {op.timeout_s:g} s | {op.doc} |\n")
    parts.append("\n## Errors\n\n| class | `code` | HTTP | |\n|---|---|---|---|\n")
    parts.append("\n".join(_errors(PlaneError)) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(reference())
    sys.stdout.write(f"{TARGET}\n")
