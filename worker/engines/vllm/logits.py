"""Ends a request of vLLM whose logits are not finite numbers.

vLLM counts the NaNs in the logits of each request, and sends the count from each rank to the front end, where it is
unused. Here the ranks count before sampling, and count infinity too; the front end ends the request.
"""

from __future__ import annotations

from typing import Any

from worker.engines.common.finite_logits import NOT_FINITE, take_out

COUNT = "VLLM_COMPUTE_NANS_IN_LOGITS"
"""An environment variable of vLLM's processes that turns the count on."""

RAISE = "VLLM_RAISE_ON_LOGIT_NANS"
"""An environment variable that must not be set there: the engine would end itself."""


def count_before_sampling(runner: Any) -> None:
    """Call it once in a rank. vLLM counts after sampling, which changes logits in place: a temperature may make them
    infinite, and what a request bars hides a NaN."""
    if runner.vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu.sample import sampler

        sampler.get_num_nans = lambda logits: take_out(logits).int()
        return
    from vllm.v1.worker import gpu_model_runner

    sample, found = runner._sample, None

    def sample_counted(logits: Any, *more: Any) -> Any:
        nonlocal found
        found = None if logits is None else take_out(logits).int()
        return sample(logits, *more)

    runner._sample = sample_counted
    gpu_model_runner.count_nans_per_row = lambda logits: found


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
