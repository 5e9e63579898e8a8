"""Writes the table of docs/engines.md from the `describe` replies of a running fleet on a CPU.

python docs/generate_engines.py nats://127.0.0.1:4222 NAMESPACE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rl_plane import SyncRlClient

TARGET = Path(__file__).with_name("engines.md")
BEGIN, END = "<!-- table: docs/generate_engines.py -->\n", "<!-- end of the table -->\n"


class Feature(NamedTuple):
    """One row of the table."""

    words: str
    """The row's first cell."""
    tests: Sequence[str]
    """The tests that show the row on a CPU, as `module::name` in tests/engines. Together they run each engine."""
    on_gpu: str = ""
    """The difference on a GPU, as `describe` of a worker there says it."""
    missing: Mapping[str, str] = MappingProxyType({})
    """Engine → the reason why it lacks this, for a row that is no capability in `describe`."""


def of_engines(
    name: str, of_hf: str | None = None, *, part: Literal["generation", "updates"] = "generation"
) -> tuple[str, str]:
    """Returns two tests: one of vLLM and SGLang, and one of `hf`, which may have another name."""
    return f"test_engine_{part}::{name}", f"test_hf_{part}::{of_hf or name}"


CHOICE = of_engines("test_a_request_allows_and_bars_tokens")
PENALTIES = of_engines("test_penalties_choose_the_tokens_and_leave_the_logprobs_raw")
MODES = of_engines(
    "test_modes_for_gpus_are_refused_on_a_cpu", "test_bad_options_are_refused_before_anything_starts"
)
NOT_HF, GPU_ONLY = "the hf engine does not have this", "a mode for GPUs, refused on a CPU"

FEATURES = {
    "pause": Feature(
        "`pause` and `resume`: `keep`, `wait`, `abort`",
        (
            "test_mixed_fleet::test_streams_continue_after_a_keep_pause",
            "test_mixed_fleet::test_a_pause_that_waits_lets_streams_end",
            "test_mixed_fleet::test_a_pause_that_aborts_gives_the_tokens_so_far",
        ),
    ),
    "flush_cache": Feature(
        "`flush_cache`, `abort_requests`",
        (
            *of_engines(
                "test_a_flush_succeeds_only_while_no_request_runs",
                "test_after_a_swap_a_prompt_is_computed_again",
                part="updates",
            ),
            "test_engine_generation::test_an_abort_or_a_caller_that_leaves_ends_the_request",
            "test_hf_updates::test_abort_ends_some_or_all_with_their_tokens",
        ),
    ),
    "prepare_update": Feature(
        "base weights, staged beside the served ones",
        ("test_mixed_fleet::test_every_engine_serves_each_version_of_a_sequence",),
    ),
    "prepare_update:unstaged": Feature(
        "base weights that overwrite the served ones (`staging: none`)",
        ("test_mixed_fleet::test_weights_overwritten_in_place_are_served_unless_wrong",),
    ),
    "prepare_update:lora": Feature(
        "LoRA adapters",
        ("test_mixed_fleet::test_streams_of_a_swapped_adapter_continue_with_the_new_adapter",),
    ),
    "check_weights": Feature(
        "`check_weights`: checksum, snapshot, compare, reset_tensors",
        of_engines("test_checks_see_every_change", part="updates"),
    ),
    "release_memory": Feature(
        "`release_memory`, `resume_memory`",
        of_engines("test_the_engine_describes_itself", "test_the_hf_engine_describes_itself"),
        "`sglang`, `vllm`: yes, with `--enable-memory-saver`",
    ),
    "deterministic": Feature(
        "the same tokens in every batch (`--deterministic`)",
        MODES,
        "`sglang`, `vllm`: yes",
        {"hf": NOT_HF, "sglang": GPU_ONLY, "vllm": GPU_ONLY},
    ),
    "ranks": Feature(
        "several ranks of tensor parallelism",
        (
            "test_two_ranks::test_updates_from_files_reach_both_ranks",
            "test_hf_generation::test_the_hf_engine_describes_itself",
        ),
        missing={"hf": "the hf engine has one rank"},
    ),
    "generate:seed": Feature(
        "`seed` in a request",
        of_engines("test_a_seed_gives_the_same_tokens_whatever_else_runs"),
        "`sglang`: only with `--deterministic`",
    ),
    "generate:prompt_logprobs": Feature(
        "`prompt_logprobs` in a request",
        ("test_mixed_fleet::test_prompt_logprobs_are_the_references",),
        "`vllm`: not with LoRA, unless `VLLM_USE_V2_MODEL_RUNNER=0`",
    ),
    "generate:top_logprobs": Feature(
        "`top_logprobs` (or `logprobs` above 1) in a request",
        of_engines("test_the_likeliest_tokens_are_those_of_a_plain_forward"),
    ),
    "generate:stop": Feature(
        "`stop` in a request", of_engines("test_stop_strings_cut_the_text_and_end_the_request")
    ),
    "generate:min_tokens": Feature("`min_tokens` in a request", CHOICE),
    "generate:logit_bias": Feature("`logit_bias` in a request", CHOICE),
    "generate:allowed_token_ids": Feature("`allowed_token_ids` in a request", CHOICE),
    "generate:bad_words_token_ids": Feature("`bad_words_token_ids` in a request", CHOICE),
    "generate:min_p": Feature(
        "`min_p` in a request",
        of_engines(
            "test_min_p_excludes_unlikely_tokens_or_is_refused", "test_the_sampler_follows_the_distribution"
        ),
    ),
    "generate:frequency_penalty": Feature("`frequency_penalty` in a request", PENALTIES),
    "generate:presence_penalty": Feature("`presence_penalty` in a request", PENALTIES),
    "generate:repetition_penalty": Feature("`repetition_penalty` in a request", PENALTIES),
    "generate:structured_output": Feature(
        "structured output: a text of a given form",
        (
            "test_structured_output::test_a_text_has_the_form_that_its_request_gives",
            "test_hf_generation::test_the_hf_engine_describes_itself",
        ),
    ),
    "parse_tool_calls": Feature(
        "tool calls that the model makes by itself, with `--engine-arg tool_call_parser`",
        ("test_mixed_fleet::test_a_text_has_its_form_by_every_route",),
    ),
    "generate:cache_salt": Feature(
        "`cache_salt` in a request",
        (
            "test_engine_generation::test_a_prefix_is_shared_with_the_same_salt_alone",
            "test_hf_updates::test_after_a_swap_a_prompt_is_computed_again",
        ),
    ),
    "generate:truncate_prompt_tokens": Feature(
        "`truncate_prompt_tokens` in a request",
        of_engines("test_a_request_allows_and_bars_tokens", "test_a_truncated_prompt_is_its_last_tokens"),
    ),
}
"""The rows by their capability in `describe`, or by a name of this file."""
OF_THE_MODEL = frozenset({"generate:routed_experts", "generate:task.classify", "generate:task.embed"})
"""Capabilities that depend on the model, so the table leaves them out. The page describes them."""
SAME = {"resume_memory": "release_memory", "update_weights:lora": "prepare_update:lora"}


def table(described: Iterable[Mapping[str, Any]]) -> str:
    """Makes the table from the rows of `describe`: a column for each engine, and a note for each reason."""
    engines = sorted(described, key=lambda row: str(row["engine"]))
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{row['engine']} {row['engine_version']}" for row in engines) + " | on a GPU |",
        "|---" * (len(engines) + 2) + "|",
    ]
    for row in engines:
        if unknown := {SAME.get(name, name) for name in row["lacks"]} - FEATURES.keys() - OF_THE_MODEL:
            raise SystemExit(f"no words for {sorted(unknown)}: add them to FEATURES")
    for name, feature in FEATURES.items():
        cells = []
        for row in engines:
            reason = row["lacks"].get(name, feature.missing.get(row["engine"]))
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("yes" if reason is None else f"no ({notes.index(reason) + 1})")
        lines.append(" | ".join([f"| {feature.words}", *cells, f"{feature.on_gpu} |"]))
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
