"""Checks the answers of a listener against its OpenAPI document."""

from __future__ import annotations

from typing import Any

import jsonschema_rs

from rl_plane.protocol.fleet_ops import FleetOp

REFS = "#/components/schemas/"


def described_reply(document: dict[str, Any], op: FleetOp) -> str:
    """The name of the schema that the document gives for the op's answer."""
    operation = document["paths"][f"/v1/rl/{op.path}"][op.method.lower()]
    reference: str = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert reference.startswith(REFS)
    return reference.removeprefix(REFS)


def reply_faults(document: dict[str, Any], op: FleetOp, answer: Any) -> list[str]:
    """Says where an answer differs from the schema of its op. A field that the schema does not name is a fault too."""
    name = described_reply(document, op)
    validator = jsonschema_rs.Draft202012Validator({"$ref": REFS + name, "components": document["components"]})
    wrong = [f"{list(error.instance_path)}: {error.message[:300]}" for error in validator.iter_errors(answer)]
    unknown = answer.keys() - document["components"]["schemas"][name]["properties"].keys()
    return [*wrong, *(f"{field} is not described" for field in sorted(unknown))]
