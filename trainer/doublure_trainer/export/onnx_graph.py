"""The stand-in as an ONNX graph: points in, linear RGB out. Needs the `onnx` package.

Lookups are GridSample (opset 20, which is the first with volumes), whose `border` padding and
align_corners=0 are the specification's clamping and texel centres; layers are Gemm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from doublure_bridge.model_file import ModelFile
from doublure_bridge.models import LOG_LIMIT

from .errors import ExportError
from .variant import Texels, Variant, activation

__all__ = ["ACTIVATION_OPS", "OPSET", "onnx_bytes"]

OPSET = 20

ACTIVATION_OPS = {"relu": "Relu", "sine": "Sin"}
"""Activation -> ONNX operator."""

# Columns of the points that each texture's columns, rows (and slices) are.
_AXES = {"plane.xy": (0, 1), "plane.xt": (0, 2), "plane.yt": (1, 2), "volume": (0, 1, 2)}


def onnx_bytes(model: ModelFile, variant: Variant, *, name: str) -> bytes:
    """A serialised model: `points`, float32 [n, 3] (x, y, raw t), to `color`, float32 [n, 3].

    Stored numbers keep their precision: halves and bytes are initialisers that the graph decodes.

    Raises:
        ExportError: The onnx package is missing.
    """
    try:
        import onnx
    except ImportError as error:
        raise ExportError(
            "--to onnx", expected="the onnx package", next_step="pip install 'doublure[export]'"
        ) from error
    graph = _Graph(onnx)
    where = _where(graph, model.parameter)
    hidden = where
    if variant.texels:
        looked_up = [_lookup(graph, t, where) for t in variant.texels]
        hidden = graph.node("Concat", [*looked_up, where], axis=1)
    for i in range(variant.spec.layers + 1):
        weight = graph.stored(f"mlp.{i}.weight", variant)
        bias = graph.stored(f"mlp.{i}.bias", variant)
        hidden = graph.node("Gemm", [hidden, weight, bias], transB=1)
        if i < variant.spec.layers:
            hidden = graph.node(ACTIVATION_OPS[activation(variant.spec)], [hidden])
    size = graph.node("Min", [graph.node("Abs", [hidden]), graph.constant(np.float32(LOG_LIMIT))])
    grown = graph.node("Sub", [graph.node("Exp", [size]), graph.constant(np.float32(1.0))])
    graph.node("Mul", [graph.node("Sign", [hidden]), grown], output="color")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    made = helper.make_model(
        helper.make_graph(
            graph.nodes,
            name,
            [helper.make_tensor_value_info("points", kind, ["n", 3])],
            [helper.make_tensor_value_info("color", kind, ["n", 3])],
            graph.initialisers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="doublure",
        ir_version=9,
        doc_string=f"A learned stand-in for {model.name}: x, y in [-1, 1], x right and y down, "
        f"t from {model.parameter[0]:g} to {model.parameter[1]:g}; linear RGB, not clamped.",
    )
    onnx.checker.check_model(made, full_check=True)
    data: bytes = made.SerializeToString()
    return data


class _Graph:
    """Nodes and initialisers under construction; names of values are handed out here."""

    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.initialisers: list[Any] = []

    def node(self, operator: str, inputs: list[str], *, output: str = "", **attributes: Any) -> str:
        result = output or f"v{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(operator, inputs, [result], **attributes))
        return result

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"c{len(self.initialisers)}"
        self.initialisers.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def stored(self, name: str, variant: Variant) -> str:
        """One tensor of the network, in float32 whatever it is stored in."""
        value = variant.network[name]
        if not variant.half_network:
            return self.constant(value, name)
        return self.as_float(self.constant(value.astype(np.float16), name))

    def as_float(self, value: str) -> str:
        return self.node("Cast", [value], to=self._onnx.TensorProto.FLOAT)


def _where(graph: _Graph, parameter: tuple[float, float]) -> str:
    """Points with t in [-1, 1], from points with raw t."""
    low, high = parameter
    scale = np.array([1.0, 1.0, 2.0 / (high - low)], np.float32)
    middle = np.array([0.0, 0.0, (low + high) / 2.0], np.float32)
    moved = graph.node("Sub", ["points", graph.constant(middle)])
    scaled = graph.node("Mul", [moved, graph.constant(scale)])
    axis = graph.constant(np.array([1], np.int64))
    ends = [graph.constant(np.array([i], np.int64)) for i in (0, 2, 3)]
    place = graph.node("Slice", [scaled, ends[0], ends[1], axis])
    time = graph.node("Slice", [scaled, ends[1], ends[2], axis])
    limits = [graph.constant(np.float32(v)) for v in (-1.0, 1.0)]
    return graph.node("Concat", [place, graph.node("Clip", [time, *limits])], axis=1)


def _lookup(graph: _Graph, texels: Texels, where: str) -> str:
    """Four features a point, [n, 4]."""
    # Channels first, as GridSample wants them.
    stored = np.ascontiguousarray(np.moveaxis(texels.stored, -1, 0)[None])
    axes = _AXES[texels.name]
    image = graph.as_float(graph.constant(stored, texels.name))
    columns = graph.constant(np.array(axes, np.int64))
    chosen = graph.node("Gather", [where, columns], axis=1)
    ones = [1] * (len(axes) - 1)
    shape = graph.constant(np.array([1, -1, *ones, len(axes)], np.int64))
    grid = graph.node("Reshape", [chosen, shape])
    found = graph.node(
        "GridSample", [image, grid], mode="linear", padding_mode="border", align_corners=0
    )
    # [1, 4, n, 1] or [1, 4, n, 1, 1] to [n, 4]
    flat = graph.node("Reshape", [found, graph.constant(np.array([4, -1], np.int64))])
    features = graph.node("Transpose", [flat], perm=[1, 0])
    if texels.eight_bit:
        scaled = graph.node("Mul", [features, graph.constant(texels.scale)])
        features = graph.node("Add", [scaled, graph.constant(texels.offset)])
    return features
