"""Chat messages, and what a chat template is given besides: of `/v1/chat/completions` and of `/tokenize`.

Templates differ in what they take, so a message goes to them in one form: its content is a string, the arguments of its
tool calls are objects.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.generation import Rendering
from rl_plane.protocol.strict_json import parse_json_object

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

MAX_CALLS = 256
"""Tool calls of one message."""
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024

_REFUSED_IN_MESSAGES = ("function_call", "refusal", "audio", "annotations")
_TEXT_BETWEEN_PARTS = "\n"
"""As vLLM joins them."""


class TextPart(BaseModel):
    model_config = STRICT

    type: str
    text: str


class CalledFunction(BaseModel):
    model_config = STRICT

    name: str
    arguments: str | dict[str, Any]
    """JSON, or what it says."""


class ToolCall(BaseModel):
    model_config = STRICT

    id: str | None = None
    type: str = "function"
    index: int | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = STRICT

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None
    """Several texts are joined by a line's end. None, only with `tool_calls` or `reasoning_content`: empty."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None


class TemplateBody(BaseModel):
    """What messages become a prompt by."""

    model_config = STRICT

    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    """Shown to the model as they are."""
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the model's chat template reads, as `enable_thinking`."""
    chat_template_args: dict[str, Any] | None = None
    """The same, as Dynamo's clients say it."""
    add_generation_prompt: bool | None = None
    """Of messages: the head of the next reply. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Of messages: leave the last one open."""

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        if self.chat_template_kwargs and self.chat_template_args:
            raise InvalidRequest(
                "chat_template_kwargs and chat_template_args are both given",
                field="chat_template_args",
                fix="send one of the two",
            )
        return self.chat_template_kwargs or self.chat_template_args or None

    def rendering(self) -> Rendering:
        return Rendering.of(
            self.tools,
            self.documents,
            self.template_kwargs,
            self.add_generation_prompt,
            self.continue_final_message,
        )

    def plain_messages(self) -> list[dict[str, Any]]:
        """As templates are given them."""
        return [_plain(number, message) for number, message in enumerate(self.messages or ())]


def _plain(number: int, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = _TEXT_BETWEEN_PARTS.join(part.text for part in content)
    elif content is None:
        if not (message.tool_calls or message.reasoning_content):
            raise InvalidRequest(
                f"messages.{number} has no content", field=f"messages.{number}.content", fix="add a text"
            )
        content = ""
    plain: dict[str, Any] = {"role": message.role, "content": content}
    plain |= message.model_dump(exclude={"role", "content", "tool_calls"}, exclude_none=True)
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(f"messages.{number}.tool_calls.{place}", call)
            for place, call in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(where: str, call: ToolCall) -> dict[str, Any]:
    """The arguments are an object: a template that writes JSON would quote a string once more."""
    if call.type != "function":
        raise InvalidRequest(f"{where}.type is {call.type[:64]!r}", field=f"{where}.type", fix="send function")
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = parse_json_object(arguments.encode())
        except InvalidRequest as error:
            field = f"{where}.function.arguments"
            raise InvalidRequest(f"{field}: {error}", field=field, fix="send a JSON object") from error
    told = {} if call.id is None else {"id": call.id}
    return {**told, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def without_nulls_in_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Clients send a reply's message back with fields that say nothing."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return {**body, "messages": [_without_nulls(one) if isinstance(one, dict) else one for one in messages]}


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in message.items() if value is not None and (key, value) != ("annotations", [])
    }


def refuse_in_messages(body: dict[str, Any]) -> None:
    """Known parts of chat messages that we don't serve."""
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        for field in _REFUSED_IN_MESSAGES:
            if field in message:
                where = f"messages.{number}.{field}"
                raise Unsupported(f"{where} is not supported here", field=where, fix="leave it out")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                where, kind = f"messages.{number}.content", str(part["type"])[:64]
                raise Unsupported(f"{where} of type {kind!r} is not supported here", field=where, fix="send text")
