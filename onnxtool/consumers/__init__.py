"""Run the folder of a target in its consumer, and compare the answers with the checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.consumers.run import ConsumerReport as ConsumerReport
    from onnxtool.consumers.run import verify_in_consumer as verify_in_consumer

_MODULES = {
    "ConsumerReport": "onnxtool.consumers.run",
    "verify_in_consumer": "onnxtool.consumers.run",
}

__all__ = ["ConsumerReport", "verify_in_consumer"]

__getattr__ = lazy_names(__name__, _MODULES)
