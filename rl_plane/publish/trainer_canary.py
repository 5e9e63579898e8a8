"""The numeric canary of a publisher: log probabilities that the trainer's own model gives for fixed token sequences.

Torch is imported only when a model is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import LOGPROB_EPSILON, MIN_LOGPROB, Canary, check_vocabulary, parse_canary
from rl_plane.publish.sources.base import WeightSource
from rl_plane.publish.sources.module import ModuleSource

if TYPE_CHECKING:
    import torch

CanaryMaker = Callable[[Any, "str | None"], "Canary | Mapping[str, Any]"]
PublishedCanary = Sequence[Sequence[int]] | CanaryMaker | Literal["off"] | None
"""The values of `WeightPublisher(canary=…)`."""

_CALLABLE = "give a function canary(model, version) that returns {sequences, expected}; every rank calls it"


class CanarySource:
    """Makes the canary of each version that a publisher sends."""

    def __init__(
        self, canary: PublishedCanary, tolerance: float | None, source: WeightSource, given: Any, adapter: bool
    ) -> None:
        """`given`: the source as the trainer gave it to the publisher."""
        self._canary = canary
        self._tolerance = tolerance
        self._given = given
        self._module = source.module if isinstance(source, ModuleSource) else None
        if canary is None or canary == "off":
            if tolerance is not None:
                raise InvalidRequest(
                    "tolerance is given without a canary", field="tolerance", fix="give canary=[[1, 2, 3]] too"
                )
            return
        if adapter:
            raise InvalidRequest(
                "a canary scores the base weights, which an adapter does not change",
                field="canary",
                fix="leave it out",
            )
        if callable(canary):
            return
        given_sequences: Any = canary
        if isinstance(canary, (list, tuple)):
            given_sequences = [list(one) if isinstance(one, (list, tuple)) else one for one in canary]
        self._sequences = self._checked({"sequences": given_sequences}).sequences
        if self._module is None:
            raise InvalidRequest(
                "log probabilities need a module, and the source has none",
                field="canary",
                fix=_CALLABLE,
            )
        if source.collective:
            raise InvalidRequest(
                "the model is sharded, so its forward needs every rank, and perhaps the trainer's own wrapper",
                field="canary",
                fix=f"{_CALLABLE}; rl_plane.publish.expected_logprobs(model, sequences) is its forward",
            )

    def policy(self, version: str | None, rank: int) -> dict[str, Any]:
        """The canary's part of this version's policy. Runs on the caller's thread, on every rank."""
        if self._canary is None or (rank != 0 and not callable(self._canary)):
            return {}
        if self._canary == "off":
            return {"canary": "off"}
        if callable(self._canary):
            made = self._canary(self._module if self._module is not None else self._given, version)
            value = made.model_dump() if isinstance(made, Canary) else made
        else:
            value = {"sequences": self._sequences, "expected": expected_logprobs(self._module, self._sequences)}
        return {"canary": self._checked(value).model_dump()}

    def _checked(self, value: Any) -> Canary:
        if self._tolerance is not None and isinstance(value, Mapping) and value.get("tolerance") is None:
            value = {**value, "tolerance": self._tolerance}
        return parse_canary(value, "canary")


def expected_logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Computes the log probability of each token but the first, in nats, for each sequence.

    The model runs in eval mode, without gradients and with PEFT's adapters off; afterwards each module has its own mode
    again. A sharded model needs every rank in this call.

    Args:
        model: `model(input_ids=…)` returns logits of shape [1, tokens, vocabulary], or an object with such `logits`.
        sequences: token ids.
    """
    import torch

    _check_tokens(model, sequences)
    device = next(iter(model.parameters())).device
    found = []
    with torch.no_grad(), _in_eval_mode(model), _without_adapters(model):
        for tokens in sequences:
            ids = torch.tensor([list(tokens)], dtype=torch.long, device=device)
            out = model(input_ids=ids)
            logits = out.logits if hasattr(out, "logits") else out
            scores = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            chosen = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
            found.append([min(max(value, MIN_LOGPROB), LOGPROB_EPSILON) for value in chosen])
    return found


def _check_tokens(model: Any, sequences: Sequence[Sequence[int]]) -> None:
    """InvalidRequest for a token outside the model's vocabulary, if the model tells its vocabulary. On a GPU such a
    token would end the trainer's process."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if type(size) is int:
        check_vocabulary(
            parse_canary({"sequences": [list(tokens) for tokens in sequences]}, "canary"), size, field="canary"
        )


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Restores each module's own mode: a trainer may keep some modules in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _without_adapters(model: Any) -> Any:
    if not hasattr(model, "peft_config"):
        return nullcontext()
    if hasattr(model, "disable_adapter"):
        return model.disable_adapter()
    raise InvalidRequest(
        "the model has PEFT's adapters, which can't be switched off for the canary of its base",
        field="canary",
        fix=_CALLABLE,
    )
