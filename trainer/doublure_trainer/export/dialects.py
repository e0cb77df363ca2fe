"""How four shading languages spell the few things that a stand-in needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["GLSL", "HLSL", "WGSL", "Dialect", "number"]


def number(value: float) -> str:
    """A literal that reads back as the same float32, in every dialect."""
    text = repr(float(np.format_float_scientific(np.float32(value), unique=True)))
    return text if "." in text or "e" in text else f"{text}.0"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One language's types and the statements that differ.

    Attributes:
        half2: Two floats from one uint; {0} is the uint.
        bits4: Four floats from the bits of four uints; {0} is the vector.
        sample: A filtered fetch of level 0; {0} texture, {1} coordinates in [0, 1].
    """

    name: str
    f2: str
    f3: str
    f4: str
    u4: str
    i3: str
    f: str
    u: str
    i: str
    half2: str
    bits4: str
    sample: str
    typed_names: bool = False

    def vector(self, values: Iterable[float]) -> str:
        """Four literals as a vector."""
        return f"{self.f4}({', '.join(number(v) for v in values)})"

    def const(self, kind: str, name: str, value: str) -> str:
        """A value with a name, not changed afterwards."""
        return f"let {name} = {value};" if self.typed_names else f"{kind} {name} = {value};"

    def var(self, kind: str, name: str, value: str) -> str:
        """A variable."""
        return f"var {name} = {value};" if self.typed_names else f"{kind} {name} = {value};"

    def array(self, kind: str, name: str, count: int) -> str:
        """A local array."""
        if self.typed_names:
            return f"var {name}: array<{kind}, {count}>;"
        return f"{kind} {name}[{count}];"

    def loop(self, name: str, count: int) -> str:
        """The head of a loop from 0 to `count`, up to its opening brace."""
        if self.typed_names:
            return f"for (var {name} = 0; {name} < {count}; {name}++) {{"
        return f"for (int {name} = 0; {name} < {count}; {name}++) {{"

    def function(self, result: str, name: str, parameters: Sequence[tuple[str, str]]) -> str:
        """The head of a function, up to its opening brace."""
        if self.typed_names:
            inside = ", ".join(f"{n}: {kind}" for kind, n in parameters)
            return f"fn {name}({inside}) -> {result} {{"
        return f"{result} {name}({', '.join(f'{kind} {n}' for kind, n in parameters)}) {{"

    def select(self, condition: str, yes: str, no: str) -> str:
        if self.typed_names:
            return f"select({no}, {yes}, {condition})"
        return f"({condition}) ? {yes} : {no}"

    def fill(self, value: float) -> str:
        """A vector of one value."""
        return self.vector([value] * 4)

    def words(self, name: str, values: np.ndarray) -> str:
        """A constant array of uint vectors, [n, 4]."""
        count = len(values)
        rows = [f"{self.u4}({', '.join(f'0x{int(v):x}u' for v in row)})" for row in values]
        if self.name == "hlsl":
            head, open_, close = f"static const {self.u4} {name}[{count}] = ", "{", "};"
        elif self.name == "wgsl":
            head, open_, close = f"const {name} = array<{self.u4}, {count}>", "(", ");"
        else:
            head, open_, close = f"const {self.u4} {name}[{count}] = {self.u4}[{count}]", "(", ");"
        return head + open_ + "\n    " + ",\n    ".join(rows) + "\n" + close


GLSL = Dialect(
    name="glsl",
    f2="vec2",
    f3="vec3",
    f4="vec4",
    u4="uvec4",
    i3="ivec3",
    f="float",
    u="uint",
    i="int",
    half2="unpackHalf2x16({0})",
    bits4="uintBitsToFloat({0})",
    sample="textureLod({0}, {1}, 0.0)",
)
"""GLSL 4.50 and, in the constants storage, GLSL ES 3.00 as well."""

HLSL = Dialect(
    name="hlsl",
    f2="float2",
    f3="float3",
    f4="float4",
    u4="uint4",
    i3="int3",
    f="float",
    u="uint",
    i="int",
    half2="float2(f16tof32({0} & 0xffffu), f16tof32({0} >> 16))",
    bits4="asfloat({0})",
    sample="{0}.SampleLevel(NAME_linear, {1}, 0.0)",
)

WGSL = Dialect(
    name="wgsl",
    f2="vec2f",
    f3="vec3f",
    f4="vec4f",
    u4="vec4u",
    i3="vec3i",
    f="f32",
    u="u32",
    i="i32",
    half2="unpack2x16float({0})",
    bits4="bitcast<vec4f>({0})",
    sample="textureSampleLevel({0}, NAME_linear, {1}, 0.0)",
    typed_names=True,
)
