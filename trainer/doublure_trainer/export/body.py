"""The stand-in as one function, and the helpers it needs, in any dialect.

No matrices: languages disagree about their order. A layer is, for every four outputs, the bias plus
each input times its four weights, in the specification's order of inputs.
"""

from __future__ import annotations

from itertools import pairwise

from doublure_bridge.models import LOG_LIMIT, GridSpec

from .dialects import Dialect, number
from .layout import layout, network_vectors, quads
from .variant import ACTIVATIONS, Texels, Variant, activation, widths

__all__ = ["MAX_UNROLLED_MACS", "STORAGES", "body", "helpers"]

STORAGES = ("constants", "textures", "buffers")

MAX_UNROLLED_MACS = 4096
"""Larger networks become loops: slower a pixel, but they compile in time."""

MAX_UNROLLED_READS = 1024
"""The same where every number is read from a buffer: 2,240 of them took Mesa's compiler 17 s."""

# Coordinates of each texture, by tensor name: which of x, y, t is the column, the row, the slice.
_AXES = {"plane.xy": "xy", "plane.xt": "xz", "plane.yt": "yz", "volume": "xyz"}


def inlined(variant: Variant, storage: str) -> bool:
    """Whether the network's numbers stand in the statements themselves."""
    return storage == "constants" and variant.spec.macs <= MAX_UNROLLED_MACS


def symbol(name: str, tensor: str) -> str:
    """A tensor's identifier in the shader."""
    return f"{name}_{tensor.replace('.', '_')}"


def helpers(variant: Variant, dialect: Dialect, storage: str, name: str) -> list[str]:
    """Functions that read the block: a vector of the network, a texel, a filtered texel."""
    d = dialect
    lines: list[str] = []
    parts = {p.name: p for p in layout(variant, network=not inlined(variant, storage))}
    data = f"{name}_data"
    if "network" in parts:
        lines.append(d.function(d.f4, f"{name}_vector", [(d.i, "k")]))
        if variant.half_network:
            lines += _half_word(d, data, parts["network"].word)
        else:
            lines.append(f"    return {d.bits4.format(f'{data}[k]')};")
        lines += ["}", ""]
    if storage == "textures" or not variant.texels:
        return lines
    for texels in variant.texels:
        lines.append(d.function(d.f4, f"{symbol(name, texels.name)}_texel", [(d.i, "k")]))
        first = parts[texels.name].word
        if texels.eight_bit:
            lines += [
                "    " + d.const(d.u, "w", f"{data}[{first} + (k >> {_shift(d, 2)})][k & 3]"),
                f"    return {d.f4}({d.f}(w & 255u), {d.f}((w >> 8{_u(d)}) & 255u), "
                f"{d.f}((w >> 16{_u(d)}) & 255u), {d.f}(w >> 24{_u(d)}));",
            ]
        else:
            lines += _half_word(d, data, first)
        lines += ["}", ""]
        lines += _filtered(d, symbol(name, texels.name), texels)
    return lines


def _u(d: Dialect) -> str:
    return "u" if d.typed_names else ""


def _shift(d: Dialect, count: int) -> str:
    return f"{count}u" if d.typed_names else str(count)


def _half_word(d: Dialect, data: str, first: int) -> list[str]:
    """Vector `k` of four halves, two in a word."""
    a, b = d.half2.format("h.x"), d.half2.format("h.y")
    word = d.const(d.u4, "w", f"{data}[{first} + (k >> {_shift(d, 1)})]")
    u2 = d.u4.replace("4", "2")
    half = d.const(u2, "h", d.select("(k & 1) == 0", "w.xy", "w.zw"))
    return [f"    {word}", f"    {half}", f"    return {d.f4}({a}, {b});"]


def _filtered(d: Dialect, fetch: str, texels: Texels) -> list[str]:
    """Linear between texel centres, clamped to the edge, as a sampler does it; u in [0, 1]."""
    size = texels.stored.shape[-2::-1]  # columns, rows, slices
    planar = len(size) == 2
    f, counts = (d.f2, "2") if planar else (d.f3, "3")
    i = d.i3.replace("3", counts)
    whole = ", ".join(number(s) for s in size)
    last = ", ".join(number(s - 1) for s in size)
    zero = ", ".join("0.0" for _ in size)
    half = ", ".join("0.5" for _ in size)
    limit = ", ".join(str(s - 1) for s in size)
    one = ", ".join("1" for _ in size)
    at = f"clamp(u * {f}({whole}) - {f}({half}), {f}({zero}), {f}({last}))"
    lines = [
        d.function(d.f4, f"{fetch}_at", [(f, "u")]),
        "    " + d.const(f, "at", at),
        "    " + d.const(i, "a", f"{i}(at)"),
        "    " + d.const(i, "b", f"min(a + {i}({one}), {i}({limit}))"),
        "    " + d.const(f, "w", f"at - {f}(a)"),
    ]
    mix = "lerp" if d.name == "hlsl" else "mix"
    columns, rows = size[0], size[1]

    def row(y: str, z: str | None) -> str:
        index = f"{y}.y * {columns}" if z is None else f"({z}.z * {rows} + {y}.y) * {columns}"
        ends = ", ".join(f"{fetch}_texel({index} + {x}.x)" for x in "ab")
        return f"{mix}({ends}, w.x)"

    for z in (None,) if planar else ("a", "b"):
        lines += ["    " + d.const(d.f4, f"r{y}{z or ''}", row(y, z)) for y in "ab"]
    if planar:
        lines.append(f"    return {mix}(ra, rb, w.y);")
    else:
        lines.append(f"    return {mix}({mix}(raa, rba, w.y), {mix}(rab, rbb, w.y), w.z);")
    return [*lines, "}", ""]


def body(
    variant: Variant,
    dialect: Dialect,
    storage: str,
    name: str,
    parameter: tuple[float, float],
) -> list[str]:
    """The function itself: p in [-1, 1], x right and y down; t as the source declares it."""
    d = dialect
    low, high = parameter
    middle, scale = (low + high) / 2.0, 2.0 / (high - low)
    lines = [
        d.function(d.f3, name, [(d.f2, "p"), (d.f, "t")]),
        "    " + d.const(d.f, "s", f"clamp((t - {number(middle)}) * {number(scale)}, -1.0, 1.0)"),
    ]
    inputs = _inputs(variant, d, storage, name)
    if isinstance(variant.spec, GridSpec):
        lines.append("    " + d.const(d.f3, "u", f"{d.f3}(p, s) * 0.5 + {d.f3}(0.5, 0.5, 0.5)"))
    most = MAX_UNROLLED_MACS if storage == "constants" else MAX_UNROLLED_READS
    unrolled = variant.spec.macs <= most
    write = _unrolled if unrolled else _looped
    lines += [f"    {line}" for line in write(variant, d, storage, name, inputs)]
    limit = number(LOG_LIMIT)
    lines += [
        "    " + d.const(d.f3, "size", f"min(abs(o), {d.f3}({limit}, {limit}, {limit}))"),
        f"    return sign(o) * (exp(size) - {d.f3}(1.0, 1.0, 1.0));",
        "}",
        "",
    ]
    return lines


def _inputs(variant: Variant, d: Dialect, storage: str, name: str) -> list[str]:
    """The network's inputs in fours, as expressions of p, s and (for textures) u."""
    found = []
    for texels in variant.texels:
        where = f"u.{_AXES[texels.name]}" if len(_AXES[texels.name]) == 2 else "u"
        what = symbol(name, texels.name)
        if storage == "textures":
            value = d.sample.replace("NAME", name).format(what, where)
            unit = 255.0  # a texture of 8 bits reads as 0..1
        else:
            value, unit = f"{what}_at({where})", 1.0
        if texels.eight_bit:
            value += f" * {d.vector(texels.scale * unit)} + {d.vector(texels.offset)}"
        found.append(value)
    return [*found, f"{d.f4}(p, s, 0.0)"]


def _activated(variant: Variant, d: Dialect, value: str) -> str:
    return ACTIVATIONS[activation(variant.spec)].format(value, d.f4)


def _unrolled(
    variant: Variant, d: Dialect, storage: str, name: str, inputs: list[str]
) -> list[str]:
    spec = variant.spec
    literal = inlined(variant, storage)
    vectors = network_vectors(variant) if literal else None
    lines = [d.const(d.f4, f"h0_{i}", value) for i, value in enumerate(inputs)]
    at = 0

    def vector() -> str:
        nonlocal at
        at += 1
        if vectors is not None:
            return d.vector(vectors[at - 1])
        return f"{name}_vector({at - 1})"

    for layer, (fan_in, fan_out) in enumerate(pairwise(widths(spec))):
        for row in range(quads(fan_out)):
            total = f"s{layer + 1}_{row}"
            lines.append(d.var(d.f4, total, vector()))
            for column in range(quads(fan_in)):
                terms = []
                for k in range(4):
                    value = vector()
                    if 4 * column + k < fan_in:
                        terms.append(f"{value} * h{layer}_{column}.{'xyzw'[k]}")
                lines.append(f"{total} += " + " + ".join(terms) + ";")
            value = total if layer == spec.layers else _activated(variant, d, total)
            lines.append(d.const(d.f4, f"h{layer + 1}_{row}", value))
    return [*lines, d.const(d.f3, "o", f"h{spec.layers + 1}_0.xyz")]


def _looped(variant: Variant, d: Dialect, storage: str, name: str, inputs: list[str]) -> list[str]:
    del storage  # always read through the block
    sizes = widths(variant.spec)
    longest = max(quads(n) for n in sizes)
    lines = [d.array(d.f4, "a", longest), d.array(d.f4, "b", longest), d.var(d.i, "at", "0")]
    lines += [f"a[{i}] = {value};" for i, value in enumerate(inputs)]
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        total = "sum" if layer == variant.spec.layers else _activated(variant, d, "sum")
        products = " + ".join(
            f"{name}_vector(at{f' + {k}' if k else ''}) * a[column].{'xyzw'[k]}" for k in range(4)
        )
        lines += [
            d.loop("row", quads(fan_out)),
            "    " + d.var(d.f4, "sum", f"{name}_vector(at)"),
            "    at += 1;",
            "    " + d.loop("column", quads(fan_in)),
            f"        sum += {products};",
            "        at += 4;",
            "    }",
            f"    b[row] = {total};",
            "}",
            d.loop("row", quads(fan_out)),
            "    a[row] = b[row];",
            "}",
        ]
    return [*lines, d.const(d.f3, "o", "a[0].xyz")]
