"""Getting a learned stand-in out to other engines; `docs/export.md` says how to use the files."""

from __future__ import annotations

from .errors import ExportError
from .package import TARGETS, Exported, export_model

__all__ = ["TARGETS", "ExportError", "Exported", "export_model"]
