"""What exports refuse."""

from __future__ import annotations

from doublure_bridge.errors import BridgeError

__all__ = ["ExportError"]


class ExportError(BridgeError):
    """A model that cannot be exported as asked, or a place it cannot be written to."""
