"""The parsers of tool calls that vLLM and SGLang have, on engines without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from rl_plane.errors import InvalidRequest
from worker.engines.base import EngineOptions
from worker.engines.common.tokenizing import load_tokenizer
from worker.engines.common.tool_call_parsing import SAMPLE_TOOL, ToolCallParsing
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)")  # theirs

CALL = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
BROKEN = {
    "internlm": '<|action_start|><|plugin|>{"name": "look", <|action_end|>',
    "qwen": '<tool_call>["a"]</tool_call>',
}
"""Texts that raise an error in the parser."""


class NoProcess:
    """Stands in for an engine's processes, which are not to start."""

    device = "cpu"

    async def end(self) -> None:
        pass


def of_vllm(model: Path, **extra: str) -> ToolCallParsing:
    from worker.engines.vllm.adapter import VllmEngine

    process: Any = NoProcess()
    return VllmEngine(EngineOptions(model, extra=extra), process)


def of_sglang(model: Path, **extra: str) -> ToolCallParsing:
    from worker.engines.sglang.adapter import SglangEngine

    process: Any = NoProcess()
    return SglangEngine(EngineOptions(model, extra=extra), process)


def with_tokenizer(engine: ToolCallParsing) -> ToolCallParsing:
    """The engine as if it had started, with a tokenizer and nothing else."""
    info: Any = SimpleNamespace(lacks={}, vocab_size=VOCAB_SIZE)
    engine._tokenizer, engine._info = load_tokenizer(engine._options.model), info
    return engine


async def _check_broken(engine: ToolCallParsing, parser: str) -> None:
    """A text that the parser can't read stays as it is, and the next text is read."""
    await engine._use_parser(parser)
    tokens = engine._tokenizer.encode(BROKEN[parser])
    reply = await engine.parse_tool_calls(tokens, [SAMPLE_TOOL])
    assert (reply["content"], reply["calls"]) == (engine._tokenizer.decode(tokens, skip_special_tokens=True), [])
    await engine._use_parser("hermes")
    reply = await engine.parse_tool_calls(engine._tokenizer.encode(f"I look. {CALL}"), [SAMPLE_TOOL])
    assert [call["name"] for call in reply["calls"]] == ["look"]


async def _check_refused(engine: ToolCallParsing) -> None:
    """The engine does not start: it refuses its parser before it loads the model."""
    with pytest.raises(InvalidRequest) as caught:
        await engine.start()
    assert caught.value.facts["field"] == "engine_arg.tool_call_parser"


async def _check_tools(engine: ToolCallParsing) -> None:
    await engine._use_parser("hermes")
    with pytest.raises(InvalidRequest) as caught:
        await engine.parse_tool_calls([], [{"type": "function"}])
    assert caught.value.facts["field"] == "tools"


@pytest.mark.engines("vllm")
async def test_vllms_parsers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    await _check_refused(of_vllm(model, tool_call_parser="openai"))  # a stub: vLLM reads these texts elsewhere
    await _check_refused(of_vllm(model, tool_call_parser="none such"))
    await _check_tools(with_tokenizer(of_vllm(model)))
    await _check_broken(with_tokenizer(of_vllm(model)), "internlm")


@pytest.mark.engines("vllm")
async def test_vllms_parsers_read_the_vocabulary_once(tmp_path: Path) -> None:
    engine = with_tokenizer(of_vllm(make_tiny_model(tmp_path / "model", 0)))
    vocabulary, reads = engine._tokenizer.get_vocab(), []

    def get_vocab() -> Any:
        reads.append(1)
        return vocabulary

    engine._tokenizer.get_vocab = get_vocab
    await engine._use_parser("internlm")
    for _ in range(3):
        await engine.parse_tool_calls([], [SAMPLE_TOOL])
    assert len(reads) == 1


@pytest.mark.engines("sglang")
async def test_sglangs_parsers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    await _check_refused(
        of_sglang(model, tool_call_parser="response_template")
    )  # the tokenizer has no such template
    await _check_refused(of_sglang(model, tool_call_parser="none such"))
    await _check_tools(with_tokenizer(of_sglang(model)))
    await _check_broken(with_tokenizer(of_sglang(model)), "qwen")
