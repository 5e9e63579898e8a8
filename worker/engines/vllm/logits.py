"""Looks at vLLM's logits as the model made them, before grammars and other limits change them.

A request whose logits are not finite numbers ends. vLLM counts the NaNs in the logits of each request, and sends the
count from each rank to the front end, where it is unused. Here the ranks count before sampling, and count infinity too;
the front end ends the request.

Raw logprobs are of these logits, too. vLLM takes them from logits in which grammars have barred tokens.
"""

from __future__ import annotations

from typing import Any

from rl_plane.protocol.generation import RAW_LOGPROBS
from worker.engines.common.finite_logits import NOT_FINITE, take_out

COUNT = "VLLM_COMPUTE_NANS_IN_LOGITS"
"""An environment variable of vLLM's processes that turns the count on."""

RAISE = "VLLM_RAISE_ON_LOGIT_NANS"
"""An environment variable that must not be set there: the engine would end itself."""


class RawLogits:
    """The logits of the present step, from before grammars barred tokens in them."""

    def __init__(self, of_logprobs: bool) -> None:
        """`of_logprobs`: logprobs are of the raw logits."""
        self._of_logprobs = of_logprobs
        self._masked: Any = None
        """The tensor in which grammars bar tokens. None: no grammar does so in this step."""
        self._raw: Any = None
        self._found: Any = None

    def keep(self, logits: Any) -> None:
        """Call it before grammars bar tokens in `logits`."""
        self._found = take_out(logits).int()
        self._masked, self._raw = logits, logits.clone() if self._of_logprobs else logits

    def count(self, logits: Any) -> Any:
        """Counts for each row of `logits` whether it is not finite. Call it before sampling."""
        if logits is self._masked:
            return self._found
        self._masked = self._raw = self._found = None
        return take_out(logits).int()

    def of(self, logits: Any) -> Any:
        """The logits that logprobs are of, which vLLM would take from `logits`."""
        return self._raw if logits is self._masked else logits


def look_before_sampling(runner: Any) -> None:
    """Call it once in a rank. vLLM counts after sampling, which changes logits in place: a temperature may make them
    infinite, and what a request bars hides a NaN."""
    raw = RawLogits(runner.model_config.logprobs_mode == RAW_LOGPROBS)
    if runner.vllm_config.use_v2_model_runner:
        _look_in_second_runner(raw)
    else:
        _look_in_first_runner(raw, runner)


def _look_in_first_runner(raw: RawLogits, runner: Any) -> None:
    from vllm.v1.worker import gpu_model_runner

    mask, sample, logprobs = (
        gpu_model_runner.apply_grammar_bitmask,
        runner._sample,
        runner.sampler.compute_logprobs,
    )
    found: Any = None

    def mask_kept(step: Any, grammars: Any, batch: Any, logits: Any) -> None:
        raw.keep(logits)
        mask(step, grammars, batch, logits)

    def sample_counted(logits: Any, *more: Any) -> Any:
        nonlocal found
        found = None if logits is None else raw.count(logits)
        return sample(logits, *more)

    gpu_model_runner.apply_grammar_bitmask = mask_kept
    gpu_model_runner.count_nans_per_row = lambda logits: found
    runner._sample = sample_counted
    runner.sampler.compute_logprobs = lambda logits: logprobs(raw.of(logits))


def _look_in_second_runner(raw: RawLogits) -> None:
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    mask, scores = StructuredOutputsWorker.apply_grammar_bitmask, sampler.compute_topk_scores

    def mask_kept(worker: Any, logits: Any, *more: Any) -> None:
        raw.keep(logits)
        mask(worker, logits, *more)

    StructuredOutputsWorker.apply_grammar_bitmask = mask_kept
    sampler.get_num_nans = raw.count
    sampler.compute_topk_scores = lambda logits, *more, **named: scores(raw.of(logits), *more, **named)


def end_by_count(llm: Any) -> None:
    """Call it once in the front end. `llm`: an AsyncLLM. A request ends before the first token that has a count: its
    finish reason is `error`, and its stop reason says why."""
    from vllm.v1.engine import FinishReason

    processor = llm.output_processor
    process = processor.process_outputs

    def process_counted(outputs: list[Any], *more: Any, **options: Any) -> Any:
        counted = [output for output in outputs if output.num_nans_in_logits]
        for output in counted:
            output.new_token_ids, output.new_logprobs = [], None
            output.finish_reason, output.stop_reason = FinishReason.ERROR, NOT_FINITE
        processed = process(outputs, *more, **options)
        processed.reqs_to_abort.extend(output.request_id for output in counted)  # the scheduler still runs them
        return processed

    processor.process_outputs = process_counted
