"""The parsers of tool calls that vLLM and SGLang have, on engines without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rl_plane.errors import InvalidRequest
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.common.tokenizing import load_tokenizer
from worker.engines.common.tool_call_parsing import ARGUMENT, SAMPLE_TOOL, ToolCallParsing
from worker.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)")  # theirs

INTERNLM_CALL = '<|action_start|><|plugin|>{"name": "look", "parameters": {"place": "here"}}<|action_end|>'
INTERNLM_BROKEN = '<|action_start|><|plugin|>{"name": "look", <|action_end|>'
QWEN_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
QWEN_BROKEN = '<tool_call>["a"]</tool_call>'
"""The broken texts raise an error in the parser."""


PYTHONIC_CALL = '[look(place="here", far=True), look(place="there")]'
PYTHONIC_ENDLESS = "[A(A=" + "\t)A(A=,\t" * 60
"""The pattern of SGLang's parser would search this text for years."""


DEEPSEEK_ENDLESS = "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜><｜tool▁sep｜>" * 4000
"""The patterns of vLLM's parsers would search this text for more than half an hour."""
DEEPSEEK_CALLS = {
    "deepseek_v3": "function<｜tool▁sep｜>look\n```json\n{}\n```",
    "deepseek_v31": "look<｜tool▁sep｜>{}",
}
DEEPSEEK_TOKENS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)


class NoProcess:
    """Stands in for an engine's processes, which are not to start."""

    device = "cpu"

    async def end(self) -> None:
        pass


class ParsersOnly(ToolCallParsing):
    """An engine that starts with a tokenizer, with the parser that its options name, and with nothing else."""

    async def _start(self) -> EngineInfo:
        self._load_tokenizer()
        await self._use_parser(self._options.extra[ARGUMENT])
        return EngineInfo(
            engine="none",
            engine_version="none",
            model="none",
            dtype="float32",
            device="cpu",
            world_size=1,
            vocab_size=len(self._tokenizer),
            max_model_len=1,
            lacks={},
            transports=(),
        )


def _of_vllm(model: Path, parser: str, *, starts: bool = False) -> ToolCallParsing:
    """`starts`: the engine can start, as far as its parser can."""
    from worker.engines.vllm.adapter import VllmEngine

    class Parsers(ParsersOnly, VllmEngine):
        pass

    process: Any = NoProcess()
    return (Parsers if starts else VllmEngine)(EngineOptions(model, extra={ARGUMENT: parser}), process)


def _of_sglang(model: Path, parser: str, *, starts: bool = False) -> ToolCallParsing:
    """`starts`: the engine can start, as far as its parser can."""
    from worker.engines.sglang.adapter import SglangEngine

    class Parsers(ParsersOnly, SglangEngine):
        pass

    process: Any = NoProcess()
    return (Parsers if starts else SglangEngine)(EngineOptions(model, extra={ARGUMENT: parser}), process)


async def _check_broken(engine: ToolCallParsing, model: Path, broken: str, whole: str) -> None:
    """A text that the parser can't read stays as it is, and the next text is read."""
    await engine.start()
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(broken)
    reply = await engine.parse_tool_calls(tokens, [SAMPLE_TOOL])
    assert (reply["content"], reply["calls"]) == (tokenizer.decode(tokens, skip_special_tokens=True), [])
    reply = await engine.parse_tool_calls(tokenizer.encode(f"I look. {whole}"), [SAMPLE_TOOL])
    assert [call["name"] for call in reply["calls"]] == ["look"]


async def _check_refused(engine: ToolCallParsing) -> None:
    """The engine does not start: it refuses its parser before it loads the model."""
    with pytest.raises(InvalidRequest) as caught:
        await engine.start()
    assert caught.value.facts["field"] == "engine_arg.tool_call_parser"


async def _check_tools(engine: ToolCallParsing) -> None:
    await engine.start()
    with pytest.raises(InvalidRequest) as caught:
        await engine.parse_tool_calls([], [{"type": "function"}])
    assert caught.value.facts["field"] == "tools"


@pytest.mark.engines("vllm")
async def test_vllms_parsers_survive_broken_texts_and_refuse_bad_input(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    await _check_refused(_of_vllm(model, "openai"))  # a stub: vLLM reads these texts elsewhere
    await _check_refused(_of_vllm(model, "none such"))
    await _check_tools(_of_vllm(model, "hermes", starts=True))
    await _check_broken(_of_vllm(model, "internlm", starts=True), model, INTERNLM_BROKEN, INTERNLM_CALL)


@pytest.mark.engines("vllm")
async def test_vllms_parsers_read_the_vocabulary_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = make_tiny_model(tmp_path / "model", 0), []

    def counted(path: Path) -> Any:
        tokenizer = load_tokenizer(path)
        vocabulary = tokenizer.get_vocab()

        def get_vocab() -> Any:
            reads.append(1)
            return vocabulary

        tokenizer.get_vocab = get_vocab
        return tokenizer

    monkeypatch.setattr("worker.engines.common.generating.load_tokenizer", counted)
    engine = _of_vllm(model, "internlm", starts=True)
    await engine.start()
    for _ in range(3):
        await engine.parse_tool_calls([], [SAMPLE_TOOL])
    assert len(reads) == 1


@pytest.mark.engines("vllm")
@pytest.mark.parametrize("parser", DEEPSEEK_CALLS)
async def test_a_text_that_vllms_pattern_searches_for_too_long_stays_a_text(tmp_path: Path, parser: str) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(list(DEEPSEEK_TOKENS))
    tokenizer.save_pretrained(model)
    call = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{DEEPSEEK_CALLS[parser]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    await _check_broken(_of_vllm(model, parser, starts=True), model, DEEPSEEK_ENDLESS, call)


@pytest.mark.engines("sglang")
async def test_sglangs_parsers_survive_broken_texts_and_refuse_bad_input(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    await _check_refused(_of_sglang(model, "response_template"))  # the tokenizer has no such template
    await _check_refused(_of_sglang(model, "none such"))
    await _check_tools(_of_sglang(model, "hermes", starts=True))
    await _check_broken(_of_sglang(model, "qwen", starts=True), model, QWEN_BROKEN, QWEN_CALL)


@pytest.mark.engines("sglang")
async def test_a_text_that_sglangs_pattern_searches_for_ever_stays_a_text(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 0)
    engine = _of_sglang(model, "pythonic", starts=True)
    await engine.start()
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(PYTHONIC_ENDLESS)
    reply = await engine.parse_tool_calls(tokens, [SAMPLE_TOOL])
    assert (reply["content"], reply["calls"]) == (tokenizer.decode(tokens, skip_special_tokens=True), [])
    reply = await engine.parse_tool_calls(tokenizer.encode(PYTHONIC_CALL), [SAMPLE_TOOL])
    assert [call["name"] for call in reply["calls"]] == ["look", "look"]
    reply = await engine.parse_tool_calls(tokenizer.encode("No call [1] here."), [SAMPLE_TOOL])
    assert reply["calls"] == []
