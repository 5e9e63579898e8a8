"""The trainer's side: tensors out of a training loop, by any transport, as one committed update of the fleet.

torch is imported only when a source of torch tensors is used.
"""

from rl_plane._util.extras import import_error

try:
    from rl_plane.publish.publication import Progress, Publication
    from rl_plane.publish.publisher import WeightPublisher
    from rl_plane.publish.sources.adapter import AdapterSource
    from rl_plane.publish.sources.base import Taken, WeightSource
    from rl_plane.publish.sources.directory import DirectorySource
    from rl_plane.publish.sources.export import ExportSource
    from rl_plane.publish.sources.module import ModuleSource, peft_base_name
    from rl_plane.publish.sources.source_choice import as_source
    from rl_plane.publish.sources.state_dict import StateDictSource
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
    "StateDictSource",
    "Taken",
    "WeightPublisher",
    "WeightSource",
    "as_source",
    "expected_logprobs",
    "peft_base_name",
]
