"""SGLang's admin routes (0.5.23), and SGLang-Omni's two-phase ones: the fleet as one SGLang server.

When parts of an update are committed: `sglang_session`.
"""

from __future__ import annotations

from frontend.dialects.common.context import DialectContext
from frontend.dialects.sglang.adapters import mount_adapters
from frontend.dialects.sglang.areal_vllm import mount_areal_vllm
from frontend.dialects.sglang.body_tensors import HeldTensors
from frontend.dialects.sglang.control import mount_control
from frontend.dialects.sglang.groups import Groups, mount_groups
from frontend.dialects.sglang.info import mount_info
from frontend.dialects.sglang.sglang_session import Updates
from frontend.dialects.sglang.skyrl_remote import mount_skyrl_remote
from frontend.dialects.sglang.tensor_routes import mount_tensors
from frontend.dialects.sglang.update_routes import mount_updates
from frontend.dialects.sglang.weights_checker import mount_checker
from frontend.server.shared_routes import SharedRoutes


def mount(routes: SharedRoutes, context: DialectContext) -> None:
    groups = Groups(context)
    updates = Updates(context, groups, HeldTensors(context))
    mount_info(routes, context)
    mount_control(routes, context, updates)
    mount_checker(routes, context)
    mount_groups(routes, groups, updates.form_group)
    mount_updates(routes, context, updates)
    mount_tensors(routes, context, updates)
    mount_adapters(routes, context)
    mount_areal_vllm(routes, context, updates)
    mount_skyrl_remote(routes, groups, updates)
