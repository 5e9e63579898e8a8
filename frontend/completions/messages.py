"""Chat messages and the other inputs of a chat template, for `/v1/chat/completions` and `/tokenize`.

Templates differ in what they accept, so every message gets one form: its content is a string, and the arguments of its
tool calls are objects.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from frontend.completions.unserved_fields import unsupported
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import Rendering
from rl_plane.protocol.strict_json import parse_json_object
from rl_plane.protocol.validation import M, parse_body

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

MAX_CALLS = 256
"""The number of tool calls of one message."""
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024

_REFUSED_IN_MESSAGES = ("function_call", "refusal", "audio", "annotations")
_TEXT_BETWEEN_PARTS = "\n"
"""vLLM joins the texts of one message by this."""


class TextPart(BaseModel):
    model_config = STRICT

    type: str
    text: str


class CalledFunction(BaseModel):
    model_config = STRICT

    name: str
    arguments: str | dict[str, Any]
    """An object, or its JSON."""


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
    """Several texts are joined by newlines. None is empty, and needs `tool_calls` or `reasoning_content`."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None


class TemplateBody(BaseModel):
    """The fields that turn messages into a prompt."""

    model_config = STRICT

    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    """The template gets them unchanged."""
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] | None = None
    """Other variables of the model's chat template, such as `enable_thinking`."""
    chat_template_args: dict[str, Any] | None = None
    """Dynamo's name for `chat_template_kwargs`."""
    add_generation_prompt: bool | None = None
    """Add the head of the next reply after the messages. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the reply continues it."""

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
        """The messages in the form that templates get."""
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
    """Parses the arguments to an object: a template that writes JSON would quote a string again."""
    if call.type != "function":
        raise InvalidRequest(f"{where}.type is {call.type[:64]!r}", field=f"{where}.type", fix="send function")
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = parse_json_object(arguments.encode())
        except InvalidRequest as error:
            field = f"{where}.function.arguments"
            raise InvalidRequest(f"{field}: {error}", field=field, fix="send a JSON object") from error
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def parse_chat(model: type[M], body: dict[str, Any]) -> M:
    """Parses a body that may have chat messages. Raises Unsupported if a message has a part that is not served.

    Drops null fields of messages: clients send a reply's message back with such fields."""
    messages = body.get("messages")
    if isinstance(messages, list):
        checked = [_checked_message(at, one) if isinstance(one, dict) else one for at, one in enumerate(messages)]
        body = {**body, "messages": checked}
    return parse_body(model, body)


def _checked_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    given = {
        key: value for key, value in message.items() if value is not None and (key, value) != ("annotations", [])
    }
    for field in _REFUSED_IN_MESSAGES:
        if field in given:
            raise unsupported(f"messages.{number}.{field}")
    content = given.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            where, kind = f"messages.{number}.content", str(part["type"])[:64]
            raise unsupported(where, "send text", f"{where} of type {kind!r}")
    return given
