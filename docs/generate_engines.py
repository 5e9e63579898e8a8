"""Writes the table of docs/engines.md from what the workers of a running fleet say of themselves.

python docs/generate_engines.py nats://127.0.0.1:4222 NAMESPACE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_plane import SyncRlClient

TARGET = Path(__file__).with_name("engines.md")
BEGIN, END = "<!-- table: docs/generate_engines.py -->\n", "<!-- end of the table -->\n"

FEATURES = {
    "pause": "`pause` and `resume`: `keep`, `wait`, `abort`",
    "flush_cache": "`flush_cache`, `abort_requests`",
    "prepare_update": "base weights, staged beside the served ones",
    "prepare_update:unstaged": "base weights, written over the served ones (`staging: none`)",
    "prepare_update:lora": "LoRA adapters",
    "check_weights": "`check_weights`: checksum, snapshot, compare, reset_tensors",
    "release_memory": "`release_memory`, `resume_memory`",
    "generate:seed": "`seed` in a request",
    "generate:prompt_logprobs": "`prompt_logprobs` in a request",
    "generate:top_logprobs": "`top_logprobs` (or `logprobs` above 1) in a request",
    "generate:stop": "`stop` in a request",
    "generate:min_tokens": "`min_tokens` in a request",
    "generate:logit_bias": "`logit_bias` in a request",
    "generate:logit_bias+logprobs": "`logit_bias` and `logprobs` in one request",
    "generate:allowed_token_ids": "`allowed_token_ids` in a request",
    "generate:bad_words_token_ids": "`bad_words_token_ids` in a request",
    "generate:min_p": "`min_p` in a request",
    "generate:frequency_penalty": "`frequency_penalty` in a request",
    "generate:presence_penalty": "`presence_penalty` in a request",
    "generate:repetition_penalty": "`repetition_penalty` in a request",
    "generate:cache_salt": "`cache_salt` in a request",
    "generate:truncate_prompt_tokens": "`truncate_prompt_tokens` in a request",
}
"""A capability's name, as `describe` has it, and what it is called here."""
OF_THE_MODEL = frozenset({"generate:routed_experts"})
"""What a table of these engines can't tell: it hangs on the model that they were started with. The page says it."""
SAME = {"resume_memory": "release_memory", "update_weights:lora": "prepare_update:lora"}


def table(described: Iterable[Mapping[str, Any]]) -> str:
    """Of the rows of `describe`: one column for each engine, a note for each reason why not."""
    engines = sorted(described, key=lambda row: str(row["engine"]))
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{row['engine']} {row['engine_version']}" for row in engines) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for row in engines:
        if unknown := {SAME.get(name, name) for name in row["capabilities"]} - FEATURES.keys() - OF_THE_MODEL:
            raise SystemExit(f"no words for {sorted(unknown)}: add them to FEATURES")
    for feature, words in FEATURES.items():
        cells = []
        for row in engines:
            reason = row["capabilities"].get(feature)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("yes" if reason is None else f"no ({notes.index(reason) + 1})")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def with_table(page: str, described: Iterable[Mapping[str, Any]]) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(described)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    with SyncRlClient.connect(sys.argv[1], sys.argv[2]) as fleet:
        fleet.wait_for(3)
        rows = fleet.run("describe")["workers"]
    TARGET.write_text(with_table(TARGET.read_text(), rows))
    print(TARGET)


if __name__ == "__main__":
    main()
