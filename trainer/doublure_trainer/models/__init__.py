"""The registry of models: one module a family, each the torch reading of a specification."""

from __future__ import annotations

from .base import StandIn, decode, encode
from .registry import FAMILIES, ModelCost, build, cost, export_tensors, load_tensors

__all__ = [
    "FAMILIES",
    "ModelCost",
    "StandIn",
    "build",
    "cost",
    "decode",
    "encode",
    "export_tensors",
    "load_tensors",
]
