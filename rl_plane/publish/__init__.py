"""The trainer's side: tensors out of a training loop, by any transport, as one committed update of the fleet.

torch is needed only for sources that are made of torch tensors; it is imported when one is used.
"""

from rl_plane._util.extras import import_error

try:
    from rl_plane.publish.publication import Progress, Publication
    from rl_plane.publish.publisher import WeightPublisher
    from rl_plane.publish.sources.model_sources import (
        AdapterSource,
        DirectorySource,
        ExportSource,
        ModuleSource,
        Source,
        StateDictSource,
        as_source,
        peft_base_name,
    )
    from rl_plane.publish.trainer_canary import expected_logprobs
except ModuleNotFoundError as error:
    raise import_error(error, "rl_plane.publish", "publish") from None

__all__ = [
    "AdapterSource",
    "DirectorySource",
    "ExportSource",
    "ModuleSource",
    "Progress",
    "Publication",
    "Source",
    "StateDictSource",
    "WeightPublisher",
    "as_source",
    "expected_logprobs",
    "peft_base_name",
]
