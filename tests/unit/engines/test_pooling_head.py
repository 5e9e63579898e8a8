"""The head of a pooling model, as its directory describes it, and a model whose head an engine does not serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import Unsupported
from rl_plane.protocol.pooling import Pooling
from worker.engines.common.pooling_head import read_head

PAIR = Pooling(task="classify", text_pair="b")


@pytest.mark.parametrize(
    ("config", "token_types"),
    [
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, True),
        (
            {
                "model_type": "xlm-roberta",
                "architectures": ["XLMRobertaForSequenceClassification"],
                "type_vocab_size": 1,
            },
            False,
        ),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, False),
    ],
)
def test_a_pair_is_refused_by_a_model_that_needs_token_types(
    tmp_path: Path, config: dict[str, Any], token_types: bool
) -> None:
    """BERT would take both texts for the first one. Single texts have one type only."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = read_head(tmp_path, "classify")
    head.check(Pooling(task="classify"))
    if not token_types:
        head.check(PAIR)
        return
    with pytest.raises(Unsupported, match="token types") as caught:
        head.check(PAIR)
    assert caught.value.facts["field"] == "model"
    assert caught.value.facts["fix"]
