"""The bodies of the routes of pooling models: OpenAI's and vLLM's, and SGLang's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from frontend.completions.messages import STRICT, TemplateBody
from frontend.completions.native_bodies import MAX_ID_CHARS
from frontend.completions.reply_models import Usage
from frontend.routing.demands import DemandFields
from rl_plane.protocol.pooling import MAX_DIMENSION


class PoolingExt(DemandFields):
    """The part of Dynamo's extension object that these routes have."""

    model_config = STRICT

    instance_id: str | None = None
    """Use this worker and no other."""


class PoolingBody(DemandFields):
    """The fields of all routes."""

    model_config = STRICT

    model: str | None = None
    """The model. None: the model that the fleet serves."""
    user: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=MAX_ID_CHARS)
    """Checked, and not used: the header X-Request-Id names a request."""
    nvext: PoolingExt | None = None


class InputBody(PoolingBody, TemplateBody):
    """The fields of the routes with one input for each vector: `input`, or chat `messages`."""

    input: Any = None
    """A text, a list of texts, token ids, or a list of those: at most 1024 inputs."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a text. Default true."""
    add_generation_prompt: bool | None = None
    """For messages. Default false: a reward model reads a conversation to its end."""
    use_activation: bool | None = None
    """Default true: probabilities, or an embedding of length 1. False: the model's own numbers."""


class EmbeddingsBody(InputBody):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the float32 numbers, little-endian."""
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    """Keep only the first numbers, for a model that was trained for that (Matryoshka)."""


class ClassifyBody(InputBody):
    """The body of `POST /classify`, in vLLM's form."""

    activation: bool | None = None
    """The name of `use_activation` in older versions of vLLM."""


class SglangPoolBody(PoolingBody):
    """The body of `POST /classify` and `POST /encode`, in SGLang's form."""

    text: Any = None
    """A text, or a list of texts."""
    input_ids: Any = None
    """Token ids, or a list of those."""
    rid: str | list[str] | None = None
    """Checked, and not used: the header X-Request-Id names a request."""
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    is_cross_encoder_request: Literal[False] | None = None


PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names of the two sides of a score, in vLLM's order."""


class ScoreBody(PoolingBody):
    """The body of `POST /score`, in vLLM's form: two sides, by one pair of names."""

    text_1: Any = None
    """A text, or as many as `text_2` has."""
    text_2: Any = None
    """A text, or a list of texts."""
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    use_activation: bool | None = None
    """For a classifier. Default true: the sigmoid of the logit. False: the logit. An embedding model ignores it: a
    score is the cosine."""
    max_tokens_per_query: Literal[0] | None = None
    max_tokens_per_doc: Literal[0] | None = None

    @field_validator("max_tokens_per_query", "max_tokens_per_doc", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        return "a boolean" if isinstance(value, bool) else value


class PooledReply(BaseModel):
    """The fields that the replies in OpenAI's and vLLM's form share."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[dict[str, Any]]
    """One row for each input, or for each pair."""
    usage: Usage
    nvext: dict[str, Any]
    """`weight_version` names the one version that computed every row."""
