"""What engines that are given token ids do with a tokenizer, without an engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.ops import Tokenize
from worker.engines.tokenizing import Tokenizing, eos_tokens


def test_only_what_the_model_can_make_ends_a_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "qwen3", "vocab_size": 16, "eos_token_id": [3, 15, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, -1]}))
    assert eos_tokens(tmp_path, SimpleNamespace(eos_token_id=20)) == {3, 4, 15}


class Threads:
    """A tokenizer that tells on which thread it was asked."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    def _ask(self, *args: Any, **options: Any) -> list[int]:
        self.asked.append(threading.current_thread().name)
        return [1]

    encode = apply_chat_template = decode = _ask


class Engine(Tokenizing):
    def __init__(self, tokenizer: Threads) -> None:
        self._tokenizer = tokenizer
        info: Any = SimpleNamespace(vocab_size=16)
        self._info = info

    def _running(self) -> None:
        pass


async def test_the_ops_have_threads_of_their_own() -> None:
    tokenizer = Threads()
    engine = Engine(tokenizer)
    await engine.tokenize(Tokenize(prompt="a"))
    await engine.tokenize(Tokenize(messages=[{"role": "user", "content": "a"}]))
    await engine.detokenize([1])
    assert len(tokenizer.asked) == 3
    assert all(name.startswith("tokenize") for name in tokenizer.asked)
