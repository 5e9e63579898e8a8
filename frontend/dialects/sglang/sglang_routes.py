"""SGLang's admin routes (0.5.23), and SGLang-Omni's two-phase ones: the fleet as one SGLang server.

When parts of an update are committed: `sglang_session`.
"""

from __future__ import annotations

from fastapi import FastAPI

from frontend.dialects import DialectPlane
from frontend.dialects.sglang.adapters import mount_adapters
from frontend.dialects.sglang.body_tensors import HeldTensors, Store
from frontend.dialects.sglang.control import mount_control
from frontend.dialects.sglang.groups import Groups, mount_groups
from frontend.dialects.sglang.info import mount_info
from frontend.dialects.sglang.sglang_session import Updates
from frontend.dialects.sglang.tensor_routes import mount_tensors
from frontend.dialects.sglang.update_routes import mount_updates


def mount(app: FastAPI, plane: DialectPlane) -> None:
    groups = Groups(plane)
    store = Store(plane)
    updates = Updates(plane, groups, HeldTensors(plane, store))
    mount_info(app, plane)
    mount_control(app, plane, updates)
    mount_groups(app, groups, updates.drop)
    mount_updates(app, plane, updates)
    mount_tensors(app, plane, updates, store)
    mount_adapters(app, plane)
