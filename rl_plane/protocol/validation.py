"""The base class of every request's body, and the errors of a wrong one."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import DIGEST_PATTERN

MAX_LEASE_S = 86_400.0
MAX_TIMEOUT_S = 86_400.0
"""A day. A larger bound is a typing error."""

LABEL_CHARS = 200
DIGEST = rf"^{DIGEST_PATTERN}$"
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
Label = Annotated[str, Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)]
"""The name of a version or of an adapter."""


class Body(BaseModel):
    """A request's body. It refuses unknown fields, NaN and infinities."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
        defer_build=True,  # most processes need few of them, and a worker is slow enough to start
    )


class Empty(Body):
    """No fields."""


SGLANG_PAUSES = {"retract": True, "in_place": False}
"""SGLang's own name for `keep` → whether the prefix cache is dropped. Only requests have these names: a checked body
has one of the three modes."""

PAUSE_WORDS = ("keep", "wait", "abort", *SGLANG_PAUSES)

B = TypeVar("B", bound=Body)
M = TypeVar("M", bound=BaseModel)


def without_sglangs_names(
    body: Any,
    mode: str,
    cache: str,
    check: ModelWrapValidatorHandler[B],
    *,
    drops: Any = True,
    keeps: Any = False,
    within: str = "",
) -> B:
    """Checks the body. A name of SGLang's in its field `mode` becomes `keep`, and sets its field `cache` to `drops` or
    `keeps`."""
    word = body.get(mode) if isinstance(body, dict) else None
    if not isinstance(word, str) or word not in SGLANG_PAUSES:
        return check(body)
    meant = drops if SGLANG_PAUSES[word] else keeps
    checked = check({cache: meant, **body, mode: "keep"})
    if (given := getattr(checked, cache)) != meant:
        raise InvalidRequest(
            f"{mode} {word} means keep with {cache} {str(meant).lower()}, but {cache} is {str(given).lower()}",
            field=within + cache,
            fix="leave it out, or use keep",
        )
    return checked


def parse_body(model: type[M], body: dict[str, Any]) -> M:
    """Parses a body. InvalidRequest names the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_from_pydantic(error) from error


def same_values(model: type[M], checked: BaseModel) -> M:
    """The values of a checked body as another model that shares its fields. Nothing is validated again."""
    values = {name: getattr(checked, name) for name in model.model_fields if name in type(checked).model_fields}
    if model.model_config.get("extra") == "allow":
        values |= checked.model_extra or {}
    return model.model_construct(_fields_set=checked.model_fields_set & values.keys(), **values)


FIXES = {
    "extra_forbidden": "leave it out",
    "unexpected_keyword_argument": "leave it out",
    "missing": "add it",
    "too_short": "give at least {min_length}",
    "too_long": "give at most {max_length}",
    "greater_than": "give a number above {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give a number below {lt}",
    "less_than_equal": "give {le} or less",
    "string_type": "send a string",
    "string_too_long": "send at most {max_length} characters",
    "int_type": "send an integer",
    "int_parsing": "send a whole number",
    "bool_parsing": "send true or false",
    "list_type": "send a list",
    "tuple_type": "send a list",
    "dict_type": "send a map",
    "model_type": "send a map",
    "model_attributes_type": "send a map",
    "union_tag_not_found": "add {discriminator}",
    "union_tag_invalid": "use one of {expected_tags}",
}
"""pydantic's type of an error → the fix, with the values of the error's context."""


WORDS = {
    "tuple_type": "Input should be a valid list",
    "unexpected_keyword_argument": "Extra inputs are not permitted",
    "union_tag_not_found": "Its kind is missing",
}
"""pydantic's type of an error → its message, where pydantic's own names a thing of Python's or of pydantic's."""

TAGS = {("target", "base"), ("target", "lora")}
"""A field and the kind of its value. pydantic puts the kind into the path of a part's error, and a request does not."""


def invalid_from_pydantic(error: ValidationError, prefix: str = "") -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path = [prefix] * bool(prefix) + [str(part) for part in first["loc"]]
    field = ".".join(part for before, part in pairwise(["", *path]) if (before, part) not in TAGS) or "body"
    more = error.error_count() - 1
    words = WORDS.get(first["type"], first["msg"])
    message = f"{field}: {words}" + (f" (and {more} more)" if more else "")
    fix = FIXES.get(first["type"], "{msg}").format(msg=words, **first.get("ctx", {}))
    return InvalidRequest(message, field=field, fix=fix)
