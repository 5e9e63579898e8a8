"""Helpers of `tests/fleet/test_colocated.py` and of other tests."""

from __future__ import annotations

WITHOUT_A_SAVER = """
import worker.engines.fake.adapter as fake
described = fake.EngineInfo
lacking = {"release_memory": "it has no saver", "resume_memory": "it has no saver"}
fake.EngineInfo = lambda **info: described(**info | {"lacks": lacking})
"""
