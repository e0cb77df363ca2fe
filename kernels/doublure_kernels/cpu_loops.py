"""The soft triangle rasterizer as compiled loops: spans in, pixels and gradients out.

How a tile of 64 x 16 pixels is drawn (docs/rasterizer.md has the formulas):

1. Its triangles are listed front to back. For every row, three half planes and the padded bounding
   box give the span of pixels where the weight can exceed the threshold, and within it the span
   where coverage is 1 to the last bit; there no geometry is needed. Spans are whole blocks of 8.
2. Front to back over the list: weights, and the transmittance T above each (pixel, triangle) pair,
   which is stored with what the gradients need of the geometry. Eight triangles at a time, so that
   their slow operations overlap. Once nothing shines through, the rest of the list is left out.
3. Back to front: with g = dL/dC of the finished pixel, a pair's gradient is dL/dw = T (g·c - D),
   where D = g·C_below runs along as D += w (g·c - D). No division by 1 - w, so that opaque
   triangles are as exact as any.

Precision: a float32 coordinate loses up to 6e-8 of the image, which is visible in a sigmoid of
sigma .0015. So distances are measured from where an edge crosses the row, and from the vertices,
each as the sum of two floats: their error is relative to the distance itself.

Sums run in a fixed order: over a triangle's blocks in a tile lane by lane, its lanes, tiles, and 16
or more rows of tiles a segment; segments are added in order, whichever thread drew them. A pixel's
bits depend on nothing else.

All of it is one file because Numba's cache looks at the file of the function that is called: were
what it calls in another, a change there would go unnoticed, and old code be run.
"""

# mypy: ignore-errors
# Numba types what is here.

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array

from .scene import COMPACT_RADIUS, CULL_WEIGHT

__all__ = [
    "ACC",
    "BLOCK",
    "FIELDS",
    "GEO",
    "LISTS",
    "PIXELS",
    "ROOM",
    "SPAN",
    "TILE_H",
    "TILE_W",
    "segment_rows",
    "take_part",
    "wait",
]

TILE_W, TILE_H, BLOCK = 64, 16, 8
GEO = 40  # float64 values a triangle, see `setup`
FIELDS = 7  # stored values a (pixel, triangle) pair
PLANES = 14  # stored values a pixel of the tile
LISTS = 8  # integers a triangle that a tile's list needs
ROOM = 1 << 22  # (pixel, triangle) pairs that can be stored
ACC = 12  # sums a triangle: r g b, weight, six of the vertices, sigma, spare
_CHUNK = 12288  # pairs held at a time, 28 bytes each: they stay in the second-level cache
_GROUP = 64  # triangles that are summed by themselves, so that 10,000 lose no digits
_FAR = 1e18  # coordinates are cut here, so that float32 squares stay finite

_at = np.uintp  # an unsigned index: Numba then emits no check for negative ones

_SUMS = {"contract", "reassoc", "nsz"}
_EXACT = {"contract", "nsz"}  # not reassoc: (x - hi) - lo must not become x - (hi + lo)


def _compiled(flags: set[str], **options: Any) -> Any:
    compiler: Any = njit  # its stubs know no set of fast-math flags
    return compiler(fastmath=flags, error_model="numpy", nogil=True, cache=True, **options)


# --- scalars --------------------------------------------------------------------------------------


def _element(context, builder, array_type, arguments):
    array = make_array(array_type)(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@intrinsic
def _look(_typing, array, index):  # pragma: no cover - runs in the compiler
    """An element that another thread may be writing."""

    def generate(context, builder, _signature, arguments):
        place = _element(context, builder, array, arguments)
        return builder.load_atomic(place, ordering="seq_cst", align=8)

    return types.int64(array, index), generate


@intrinsic
def _tell(_typing, array, index, _value):  # pragma: no cover - runs in the compiler
    """Write an element that another thread may be reading."""

    def generate(context, builder, _signature, arguments):
        place = _element(context, builder, array, arguments)
        builder.store_atomic(arguments[2], place, ordering="seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(array, index, types.int64), generate


@intrinsic
def _next(_typing, array, index):  # pragma: no cover - runs in the compiler
    """Add 1 to an element, and return what it was, with no thread in between."""

    def generate(context, builder, _signature, arguments):
        place = _element(context, builder, array, arguments)
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", place, one, ordering="seq_cst")

    return types.int64(array, index), generate


# --- vectors --------------------------------------------------------------------------------------

# A block's 8 values in the scene's dtype, and 8 truth values: types that exist in compiled code
# only. Left to itself the compiler makes vectors of loops as well, but it wants to know that
# nothing overlaps and how long a loop is, and a triangle's few pixels a row are over before that.


class _Vector(types.Type):
    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


class _Mask(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Mask")


_MASK = _Mask()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(
            manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), BLOCK)
        )


@register_model(_Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(ir.IntType(1), BLOCK))


_FLAGS = ("contract", "nsz")  # as `_EXACT`


def _lanes(values):
    """A constant shuffle."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), list(values))


def _spread(builder, value):
    """A scalar in all lanes; a vector as it is."""
    if isinstance(value.type, ir.VectorType):
        return value
    none = ir.Constant(ir.VectorType(value.type, BLOCK), ir.Undefined)
    one = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, none, _lanes([0] * BLOCK))


def _vector_of(*kinds):
    """The vector type among types that are it or its scalars, or None."""
    found = [kind for kind in kinds if isinstance(kind, _Vector)]
    if not found or any(kind not in (found[0], found[0].dtype) for kind in kinds):
        return None
    return found[0]


def _define(symbol, emit, gives_mask=False):  # pragma: no cover - runs in the compiler
    """Give the operator to vectors, and to vectors with scalars of their dtype."""

    @intrinsic
    def apply(_typing, a, b):
        vector = _vector_of(a, b)

        def generate(_context, builder, _signature, arguments):
            return emit(builder, *(_spread(builder, argument) for argument in arguments))

        return (_MASK if gives_mask else vector)(a, b), generate

    @overload(symbol)
    def choose(a, b):
        return (lambda a, b: apply(a, b)) if _vector_of(a, b) is not None else None


def _arithmetic(name):
    return lambda builder, a, b: getattr(builder, name)(a, b, flags=_FLAGS)


def _comparison(sign):
    return lambda builder, a, b: builder.fcmp_ordered(sign, a, b, flags=_FLAGS)


_define(operator.add, _arithmetic("fadd"))
_define(operator.sub, _arithmetic("fsub"))
_define(operator.mul, _arithmetic("fmul"))
_define(operator.truediv, _arithmetic("fdiv"))
_define(operator.lt, _comparison("<"), gives_mask=True)
_define(operator.le, _comparison("<="), gives_mask=True)
_define(operator.gt, _comparison(">"), gives_mask=True)
_define(operator.ge, _comparison(">="), gives_mask=True)


@intrinsic
def _both(_typing, a, b):  # pragma: no cover - runs in the compiler
    def generate(_context, builder, _signature, arguments):
        return builder.and_(*arguments)

    return _MASK(a, b), generate


@overload(operator.and_)
def _and(a, b):
    return (lambda a, b: _both(a, b)) if a == b == _MASK else None


@intrinsic
def _pick(_typing, condition, yes, no):  # pragma: no cover - runs in the compiler
    """`yes if condition else no` without a branch, out of which masked stores have been made."""
    kind = _vector_of(yes, no) or (_Vector(yes) if condition == _MASK else yes)

    def generate(_context, builder, _signature, arguments):
        if isinstance(kind, _Vector):
            arguments = (arguments[0], *(_spread(builder, a) for a in arguments[1:]))
        return builder.select(*arguments)

    return kind(condition, yes, no), generate


def _unary(name):
    """LLVM's function of that name on a vector."""

    @intrinsic
    def apply(_typing, a):  # pragma: no cover - runs in the compiler
        def generate(_context, builder, _signature, arguments):
            letter = "f32" if a.dtype == types.float32 else "f64"
            kind = arguments[0].type
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(kind, [kind]), f"llvm.{name}.v{BLOCK}{letter}"
            )
            return builder.call(function, arguments)

        return a(a), generate

    return apply


_root, _magnitude, _power = _unary("sqrt"), _unary("fabs"), _unary("exp")
_floor, _ceil = _unary("floor"), _unary("ceil")


@intrinsic
def _all(_typing, kind, value):  # pragma: no cover - runs in the compiler
    """`value` in all lanes; `kind` is a value of the dtype."""

    def generate(context, builder, _signature, arguments):
        return _spread(builder, context.cast(builder, arguments[1], value, kind))

    return _Vector(kind)(kind, value), generate


@intrinsic
def _ramp(_typing, start):  # pragma: no cover - runs in the compiler
    """`start`, `start` + 1, and so on."""

    def generate(_context, builder, _signature, arguments):
        first = _spread(builder, arguments[0])
        return builder.fadd(first, ir.Constant(first.type, [float(i) for i in range(BLOCK)]))

    return _Vector(start)(start), generate


@intrinsic
def _cast(_typing, kind, vector):  # pragma: no cover - runs in the compiler
    """`vector` in the dtype of which `kind` is a value."""

    def generate(context, builder, _signature, arguments):
        value, target = arguments[1], ir.VectorType(context.get_value_type(kind), BLOCK)
        if vector.dtype.bitwidth < kind.bitwidth:
            return builder.fpext(value, target)
        return builder.fptrunc(value, target) if vector.dtype.bitwidth > kind.bitwidth else value

    return _Vector(kind)(kind, vector), generate


def _lane_pointer(context, builder, signature, arguments):
    place = _element(context, builder, signature.args[0], arguments)
    element = context.get_value_type(signature.args[0].dtype)
    return builder.bitcast(place, ir.VectorType(element, BLOCK).as_pointer())


@intrinsic
def _load(_typing, array, index):  # pragma: no cover - runs in the compiler
    """8 elements from `index` on."""

    def generate(context, builder, signature, arguments):
        place = _lane_pointer(context, builder, signature, arguments)
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return _Vector(array.dtype)(array, index), generate


@intrinsic
def _store(_typing, array, index, value):  # pragma: no cover - runs in the compiler
    """Write 8 elements from `index` on."""

    def generate(context, builder, signature, arguments):
        place = _lane_pointer(context, builder, signature, arguments)
        builder.store(_spread(builder, arguments[2]), place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _total(_typing, vector):  # pragma: no cover - runs in the compiler
    """The sum of the lanes: halves are added until one is left."""

    def generate(_context, builder, _signature, arguments):
        value, n = arguments[0], BLOCK
        while n > 1:
            n //= 2
            low = builder.shuffle_vector(value, value, _lanes(range(n)))
            high = builder.shuffle_vector(value, value, _lanes(range(n, 2 * n)))
            value = builder.fadd(low, high, flags=_FLAGS)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), generate


@intrinsic
def _split(_typing, y):  # pragma: no cover - runs in the compiler
    """Floats cut to integers, as floats, and 2 to their power."""
    pair = types.UniTuple(y, 2)

    def generate(context, builder, _signature, arguments):
        integers = ir.VectorType(ir.IntType(32), BLOCK)
        whole = builder.fptosi(arguments[0], integers)
        bits = builder.add(whole, ir.Constant(integers, [127] * BLOCK))
        bits = builder.shl(bits, ir.Constant(integers, [23] * BLOCK))
        kind = arguments[0].type
        power = builder.bitcast(bits, kind)
        return context.make_tuple(builder, pair, (builder.sitofp(whole, kind), power))

    return pair(y), generate


def _exp_minus(x):
    """e^-x of x >= 0."""


@overload(_exp_minus, inline="always")
def _exp_minus_compiled(x):
    if x.dtype != types.float32:
        return lambda x: _power(x * np.float64(-1.0))

    def single(x):
        # 2^-k · 2^f with f in [-½, ½]; the polynomial is 2^f's at Chebyshev points, error 3e-9.
        # What is left beyond the limit counts nowhere, and times a gradient is still no denormal.
        limit = np.float32(60.0)
        y = _pick(x < limit, x, limit) * np.float32(-1.4426950408889634)
        whole, power = _split(y - np.float32(0.5))
        f = y - whole
        p = f * np.float32(0.00015461444724808513) + np.float32(0.0013400428177711937)
        p = p * f + np.float32(0.00961805667843204)
        p = p * f + np.float32(0.05550327226669895)
        p = p * f + np.float32(0.24022650922289554)
        p = p * f + np.float32(0.6931472067028329)
        p = p * f + np.float32(1.0)
        return p * power

    return single


@_compiled(_EXACT)
def segment_rows(height):
    """Rows that are summed as one: whole tiles, at most 32 segments an image."""
    tiles = (height + TILE_H - 1) // TILE_H
    return TILE_H * max(1, (tiles + 31) // 32)


# --- a triangle, once -----------------------------------------------------------------------------

# Places in a triangle's row of `geo`: normalised coordinates, lengths in image widths and heights.
_LIVE, _ALPHA, _OUT, _IN, _INVERSE, _FLAT, _OPEN, _TURN = 0, 1, 2, 3, 4, 5, 6, 7
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 9, 10, 11  # where it may be drawn at all
_VERTEX = 12  # x y, three times
# Unit tangent x y, unit normal inwards x y, 1/length, 1/normal x or 0 along a row; three times.
_EDGE = 18


@_compiled(_EXACT)
def setup(params, sigma, counts, compact, bbox, geo, first, last):
    """Work out what does not depend on the pixel, for triangles `first` to `last` of the batch.

    Args:
        params: [B, T, 10].
        sigma: [B, T].
        counts: [B].
        compact: Whether the kernel is the compact one.
        bbox: Whether to cut at the bounding box padded by 6 sigma.
        geo: [B, T, GEO] float64, written.
    """
    triangles = params.shape[1]
    single = params.itemsize == 4
    for index in range(first, last):
        b, t = index // triangles, index % triangles
        v, g = params[b, t], geo[b, t]
        s = np.float64(sigma[b, t])
        finite = math.isfinite(s)
        for i in range(10):
            finite &= math.isfinite(v[i])
        alpha = min(max(np.float64(v[9]), 0.0), 1.0) if finite else 0.0
        g[_LIVE] = 0.0
        if t >= counts[b] or not finite or alpha <= CULL_WEIGHT:
            continue
        g[_LIVE] = 1.0
        g[_ALPHA] = alpha
        g[_OPEN] = 1.0 if 0.0 < v[9] < 1.0 else 0.0  # a clamped opacity gets no gradient
        g[_INVERSE] = min(1.0 / s, 1e30)
        if compact:
            g[_OUT] = g[_IN] = COMPACT_RADIUS * s
        else:
            # a / (1 + e^(r / s)) = CULL_WEIGHT; a little more, since the weight itself is compared.
            g[_OUT] = s * (math.log(alpha / CULL_WEIGHT - 1.0) + 1e-3)
            g[_IN] = s * (17.5 if single else 38.0)
        x0, y0, x1 = np.float64(v[0]), np.float64(v[1]), np.float64(v[2])
        y1, x2, y2 = np.float64(v[3]), np.float64(v[4]), np.float64(v[5])
        left, right = min(x0, x1, x2), max(x0, x1, x2)
        top, bottom = min(y0, y1, y2), max(y0, y1, y2)
        pad = g[_OUT]
        g[_LEFT], g[_RIGHT], g[_TOP], g[_BOTTOM] = left - pad, right + pad, top - pad, bottom + pad
        if bbox:
            pad = 6.0 * s
            g[_LEFT], g[_RIGHT] = max(g[_LEFT], left - pad), min(g[_RIGHT], right + pad)
            g[_TOP], g[_BOTTOM] = max(g[_TOP], top - pad), min(g[_BOTTOM], bottom + pad)
        area = (x1 - x0) * (y2 - y0) - (y1 - y0) * (x2 - x0)
        g[_FLAT] = 1.0 if area == 0.0 else 0.0
        turn = g[_TURN] = -1.0 if area < 0.0 else 1.0
        for k in range(3):
            e, n = _EDGE + 6 * k, (k + 1) % 3
            ax, ay = np.float64(v[2 * k]), np.float64(v[2 * k + 1])
            bx, by = np.float64(v[2 * n]), np.float64(v[2 * n + 1])
            g[_VERTEX + 2 * k], g[_VERTEX + 2 * k + 1] = ax, ay
            length = math.hypot(bx - ax, by - ay)
            # A point has no direction: along the axes its distance comes out right.
            tx, ty = ((bx - ax) / length, (by - ay) / length) if length > 0.0 else (1.0, 0.0)
            g[e], g[e + 1] = tx, ty
            g[e + 2], g[e + 3] = -ty * turn, tx * turn
            g[e + 4] = min(1.0 / length, 1e30) if length > 0.0 else 0.0
            g[e + 5] = 1.0 / g[e + 2] if abs(g[e + 2]) >= 1e-9 else 0.0


# --- a triangle in a tile -------------------------------------------------------------------------

# A triangle's spans: four pixels of the tile for each of its rows, each for all rows. From the
# first to the last it may weigh something; between the middle two its cover is 1; the rest are two
# bands. All are whole blocks.
SPAN = 4 * TILE_H
_S1, _S2, _S3 = (_at(TILE_H * i) for i in range(1, 4))

# What the pixel loops need of a triangle, in the scene's dtype: once a tile (`k`) ...
_K_EDGE, _K_STRIDE = (
    0,
    6,
)  # slope, tangent x times a pixel, tangent x y, turn, 1/length; three times
_K_VERTEX = 18  # x high and low, in pixels of the tile; three times
_K_INSIDE, _CONSTANTS = 24, 25
# ... and once a row: crossing high and low, offset, along y at A and B; three times.
_ROWS = 15 * TILE_H
_LOW, _OFFSET, _ALONG_A, _ALONG_B = (_at(TILE_H * i) for i in range(1, 5))


@_compiled(_EXACT)
def _bounds(g, k, px, py, width, row_height, out, full):
    """How an edge bounds the row at `py`, in pixels from `px` on, and how that moves with a row.

    Returns:
        A lower bound of what is drawn and its growth a row, an upper bound and its growth; a lower
        and an upper bound of where the coverage is 1, which grow alike. A flat triangle has none.
    """
    far = 1e30
    if g[_FLAT] != 0.0:
        return -far, 0.0, far, 0.0, -far, far
    e = _EDGE + 6 * k
    d = g[e + 2] * (px - g[_VERTEX + 2 * k]) + g[e + 3] * (py - g[_VERTEX + 2 * k + 1])
    up, step = g[e + 3] * row_height, g[e + 5] * width
    if step > 0.0:
        return (-out - d) * step - 0.01, -up * step, far, 0.0, (full - d) * step + 0.01, far
    if step < 0.0:
        return -far, 0.0, (-out - d) * step + 0.01, -up * step, -far, (full - d) * step - 0.01
    # Along the row: all of it or nothing, which a bound that rises steeply says too.
    margin, steep = 1e-8 + 1e-6 * abs(d), 1e12
    return -far, 0.0, (d + out + margin) * steep, up * steep, -far, (d - full - margin) * steep


@njit(inline="always")
def _larger(a, b):
    return _pick(a > b, a, b)


@njit(inline="always")
def _smaller(a, b):
    return _pick(a < b, a, b)


@njit(inline="always")
def _blocks(n):
    """Pixels in as many whole blocks as fit in `n`."""
    return _floor(n * 0.125) * 8.0


@_compiled(_EXACT, forceinline=True)
def _span_rows(g, px, py, width, row_height, columns, first, last, span, pairs):
    """The triangle's spans on rows `first` to `last` of the tile, whose pixels `pairs` counts too.

    Returns:
        How many pixels they have.
    """
    left = (g[_LEFT] - px) * width - 0.01
    right = min((g[_RIGHT] - px) * width + 0.01, columns - 1.0)
    left = max(left, 0.0)
    out, full = g[_OUT], g[_IN]
    l0, ls0, h0, hs0, i0, j0 = _bounds(g, 0, px, py, width, row_height, out, full)
    l1, ls1, h1, hs1, i1, j1 = _bounds(g, 1, px, py, width, row_height, out, full)
    l2, ls2, h2, hs2, i2, j2 = _bounds(g, 2, px, py, width, row_height, out, full)
    last_column = -1.0 if g[_FLAT] != 0.0 else columns - 1.0
    found = _all(0.0, 0)
    for start in range(first & ~7, last, BLOCK):
        at, r = _at(start), _ramp(np.float64(start))
        a0, a1, a2 = r * ls0, r * ls1, r * ls2
        b0, b1, b2 = r * hs0, r * hs1, r * hs2
        low = _larger(_larger(a0 + l0, left), _larger(a1 + l1, a2 + l2))
        high = _smaller(_smaller(b0 + h0, right), _smaller(b1 + h1, b2 + h2))
        inner_low = _larger(_larger(a0 + i0, 0.0), _larger(a1 + i1, a2 + i2))
        inner_high = _smaller(_smaller(b0 + j0, last_column), _smaller(b1 + j1, b2 + j2))
        there = (low <= high) & (r >= np.float64(first)) & (r < np.float64(last))
        s0 = _ceil(low)
        s3 = s0 + _blocks(_floor(high) - s0 + 8.0)
        s1 = s0 + _blocks(_larger(_ceil(inner_low), s0) - s0 + 7.0)
        # The last block of a row may reach beyond the tile; nobody sees what is drawn there.
        s2 = _pick(inner_high >= columns - 1.0, s3, _floor(inner_high) + 1.0)
        s2 = s1 + _blocks(s2 - s1)
        split = (inner_low + 8.0 <= inner_high + 1.0) & (s1 < s2)
        s0, s3 = _pick(there, s0, 0.0), _pick(there, s3, 0.0)
        _store(span, at, s0)
        _store(span, at + _S1, _pick(there & split, s1, s3))
        _store(span, at + _S2, _pick(there & split, _smaller(s2, s3), s3))
        _store(span, at + _S3, s3)
        found = found + (s3 - s0)
        _store(pairs, at, _load(pairs, at) + (s3 - s0))
    return _total(found)


@njit(inline="always")
def _limited(x):
    x = _pick(x < _FAR, x, _FAR)
    return _pick(x > -_FAR, x, -_FAR)


@_compiled(_EXACT, forceinline=True)
def _constants(g, px, py, width, column_width, row_height, first, last, k, rows):
    """What the pixel loops need of a triangle in a tile, in `k` and `rows`."""
    kind = k.dtype.type
    for j in range(3):
        vx = min(max((g[_VERTEX + 2 * j] - px) * width, -_FAR), _FAR)
        high = kind(vx)
        k[_K_VERTEX + 2 * j] = high
        k[_K_VERTEX + 2 * j + 1] = kind(vx - np.float64(high))
    turn = -1.0 if g[_TURN] < 0.0 else 1.0
    zero = kind(0)
    for j in range(3):
        e, o, n = _EDGE + 6 * j, _K_EDGE + _K_STRIDE * j, (j + 1) % 3
        tx, ty, nx, ny = g[e], g[e + 1], g[e + 2], g[e + 3]
        k[o], k[o + 1], k[o + 2], k[o + 3] = (
            kind(nx * column_width),
            kind(tx * column_width),
            kind(tx),
            kind(ty),
        )
        k[o + 4], k[o + 5] = kind(turn), kind(g[e + 4])
        along_a = ty * (py - g[_VERTEX + 2 * j + 1])
        along_b = ty * (py - g[_VERTEX + 2 * n + 1])
        d = nx * (px - g[_VERTEX + 2 * j]) + ny * (py - g[_VERTEX + 2 * j + 1])
        scale = -width * g[e + 5] if g[e + 5] != 0.0 else np.inf
        up, along_up = ny * row_height, ty * row_height
        for start in range(first & ~7, last, BLOCK):
            at, r = _at(5 * TILE_H * j + start), _ramp(np.float64(start))
            dr = r * up + d
            crossing = dr * scale
            near = _magnitude(crossing) < 1e6
            # Nearly along the row, the distance hardly changes.
            crossing = _pick(near, crossing, 0.0)
            high = _cast(zero, crossing)
            _store(rows, at, high)
            _store(rows, at + _LOW, _cast(zero, crossing - _cast(0.0, high)))
            _store(rows, at + _OFFSET, _cast(zero, _pick(near, 0.0, _limited(dr))))
            _store(rows, at + _ALONG_A, _cast(zero, _limited(r * along_up + along_a)))
            _store(rows, at + _ALONG_B, _cast(zero, _limited(r * along_up + along_b)))
    k[_K_INSIDE] = kind(1e30 if g[_FLAT] else 0.0)  # a flat triangle has no inside


@njit(inline="always")
def _edge(k, o, rows, i, x, dxa, dxb, zero):
    """Signed distance to an edge's line, how far beyond its ends, how far along it, distance²."""
    p = k[o] * ((x - rows[i]) - rows[i + _LOW]) + rows[i + _OFFSET]
    la = k[o + 1] * dxa + rows[i + _ALONG_A]
    lb = k[o + 1] * dxb + rows[i + _ALONG_B]
    beyond = _pick(la < zero, la, zero) + _pick(lb > zero, lb, zero)
    return p, beyond, la, beyond * beyond + p * p


@njit(inline="always")
def _nearest(k, rows, r, x, zero, one):
    """Distance² to the boundary, the vector from it, weights of the first two vertices, inside.

    Constants are read where they are used: as variables they would be kept on the stack, in 8
    copies each.
    """
    dx0 = (x - k[_K_VERTEX]) - k[_K_VERTEX + 1]
    dx1 = (x - k[_K_VERTEX + 2]) - k[_K_VERTEX + 3]
    dx2 = (x - k[_K_VERTEX + 4]) - k[_K_VERTEX + 5]
    p0, s0, l0, m0 = _edge(k, 0, rows, r, x, dx0, dx1, zero)
    p1, s1, l1, m1 = _edge(k, 6, rows, r + _at(5 * TILE_H), x, dx1, dx2, zero)
    p2, s2, l2, m2 = _edge(k, 12, rows, r + _at(10 * TILE_H), x, dx2, dx0, zero)
    low = _pick(p1 < p0, p1, p0)
    low = _pick(p2 < low, p2, low)
    inside = low >= k[_K_INSIDE]
    first = m1 < m0
    best = _pick(first, m1, m0)
    third = m2 < best
    best = _pick(third, m2, best)
    p = _pick(first, p1, p0)
    p = _pick(third, p2, p) * k[4]
    s = _pick(first, s1, s0)
    s = _pick(third, s2, s)
    tx = _pick(first, k[8], k[2])
    tx = _pick(third, k[14], tx)
    ty = _pick(first, k[9], k[3])
    ty = _pick(third, k[15], ty)
    t = _pick(first, l1 * k[11], l0 * k[5])
    t = _pick(third, l2 * k[17], t)
    t = _pick(t < zero, zero, t)
    t = _pick(t > one, one, t)
    b0 = _pick(first, zero, one - t)
    b0 = _pick(third, t, b0)
    b1 = _pick(first, one - t, t)
    b1 = _pick(third, zero, b1)
    return best, s * tx - p * ty, s * ty + p * tx, b0, b1, inside


@njit(inline="always")
def _sigmoid(d, inside, inverse, point, one):
    """Coverage, and its derivative times sigma over the distance."""
    e = _exp_minus(d * inverse)
    # On the edge itself there is no direction, and the derivative is made 0 by the caller.
    far = _pick(d > point, d, one)
    both = one / ((one + e) * far)  # one division for 1/(1 + e) and 1/d
    r = both * far
    s = e * r
    return _pick(inside, r, s), s * r * (both * (one + e))


@njit(inline="always")
def _smoothstep(d, inside, inverse, point, zero, one):
    """The compact kernel's coverage, and its derivative times sigma over the distance."""
    z = d * inverse
    half = one / (one + one)
    u = half + _pick(inside, z, zero - z)
    u = _pick(u < zero, zero, u)
    u = _pick(u > one, one, u)
    far = _pick(d > point, d, one)
    return u * u * (one + one + one - u - u), u * (one - u) / far


# --- its pixels -----------------------------------------------------------------------------------

# Fields of a block of pairs lie side by side: what is used together shares pages and the cache's
# sets, which fields a power of two apart would all fight for.
# Of a pair: weight, transmittance above (later dL/dw), the distance's direction x y times slope,
# weights of two vertices, distance times slope.
_W, _ABOVE, _GX, _GY, _W0, _W1, _WS = (_at(BLOCK * i) for i in range(FIELDS))
_PAIRS = FIELDS * BLOCK  # values of a block of bands
_SOLID = (FIELDS - 1) * ROOM  # where solid blocks' transmittance begins, of which there are fewer
# Of a pixel of the tile: transmittance, colour, dL/dC and dL/dalpha, g · colour below, and
# transmittance and colour of the groups before; what this group covers. Rows are a block longer
# than the tile, for a span's last block.
_STRIDE = TILE_W + BLOCK
_PLANE = _STRIDE * TILE_H
PIXELS = PLANES * _PLANE
_LIGHT, _RED, _GREEN, _BLUE, _GR, _GG, _GB, _GA, _BELOW = (_at(_PLANE * i) for i in range(9))
_LIGHT_BEFORE, _RED_BEFORE, _GREEN_BEFORE, _BLUE_BEFORE = (_at(_PLANE * i) for i in range(9, 13))
_COVER = _at(_PLANE * 13)


@_compiled(_EXACT, forceinline=True)
def _place(first, last, span, at, solid, directed, k, rows, spots, store):
    """Where a triangle's bands are: signed distance² and, if `directed`, the vector and weights.

    Apart from `_cover`, whose square root, exponential and division take long to come back: over
    all pairs of some triangles in one loop they overlap.

    Returns:
        Blocks of bands, from `at` up, and solid ones, from `solid` down.
    """
    zero, one = k.dtype.type(0), k.dtype.type(1)
    for r in range(first, last):
        q = _at(r)
        begin, end = np.int64(span[q]), np.int64(span[q + _S1])
        resume, stop = np.int64(span[q + _S2]), np.int64(span[q + _S3])
        line = r * _STRIDE
        x = begin
        while x < stop:
            if x == end:
                while x < resume:
                    solid -= 1
                    spots[_at(solid)] = line + x
                    x += BLOCK
                if x >= stop:
                    break
            spots[_at(at)] = line + x
            near, ux, uy, b0, b1, inside = _nearest(k, rows, q, _ramp(k.dtype.type(x)), zero, one)
            j = _at(at * _PAIRS)
            _store(store, j + _W, _pick(inside, near, zero - near))
            if directed:
                _store(store, j + _GX, ux)
                _store(store, j + _GY, uy)
                _store(store, j + _W0, b0)
                _store(store, j + _W1, b1)
            at += 1
            x += BLOCK
    return at, solid


@_compiled(_EXACT, forceinline=True)
def _cover(first, last, inverse, alpha, compact, directed, store):
    """Weights of blocks from their distances, and if `directed` what the gradients need of them."""
    kind = store.dtype.type
    zero, one, cull, point = kind(0), kind(1), kind(CULL_WEIGHT), kind(1e-9)
    for block in range(first, last):
        i = _at(block * _PAIRS)
        m = _load(store, i)
        inside = m > zero
        d = _root(_magnitude(m))
        if compact:
            cover, slope = _smoothstep(d, inside, inverse, point, zero, one)
        else:
            cover, slope = _sigmoid(d, inside, inverse, point, one)
        v = cover * alpha
        live = v > cull
        _store(store, i + _W, _pick(live, v, zero))
        if directed:
            slope = _pick(live & (d > point), slope, zero)
            _store(store, i + _WS, slope * m)
            slope = _pick(inside, slope, zero - slope)
            _store(store, i + _GX, _load(store, i + _GX) * slope)
            _store(store, i + _GY, _load(store, i + _GY) * slope)


@_compiled(_EXACT, forceinline=True)
def _blend(entry, a, cr, cg, cb, deep, spots, store, pixel):
    """Under what is drawn already: C += c w T, then T -= w T.

    Not T *= 1 - w: there the difference is rounded, the same way each time where weights are equal.

    `deep`: with the transmittance of the groups before, and noting what this one covers: of many
    faint triangles, 1 - Σ w T is a better transmittance than the product of all 1 - w.
    """
    for block in range(entry[3], entry[4]):
        j, p = _at(block * _PAIRS), _at(spots[_at(block)])
        _blend_block(_load(store, j + _W), cr, cg, cb, deep, j + _ABOVE, p, store, pixel)
    v = _all(store.dtype.type(0), a)
    for block in range(entry[5], entry[6]):
        j, p = _at(block * BLOCK + _SOLID), _at(spots[_at(block)])
        _blend_block(v, cr, cg, cb, deep, j, p, store, pixel)


@njit(inline="always")
def _blend_block(v, cr, cg, cb, deep, j, p, store, pixel):
    t = _load(pixel, p + _LIGHT)
    wt = v * t
    _store(pixel, p + _RED, _load(pixel, p + _RED) + wt * cr)
    _store(pixel, p + _GREEN, _load(pixel, p + _GREEN) + wt * cg)
    _store(pixel, p + _BLUE, _load(pixel, p + _BLUE) + wt * cb)
    _store(pixel, p + _LIGHT, t - wt)
    if deep:
        _store(pixel, p + _COVER, _load(pixel, p + _COVER) + wt)
        t = t * _load(pixel, p + _LIGHT_BEFORE)
    _store(store, j, t)


@_compiled(_EXACT)
def _close_group(a, z, again, pixel):
    """Put pixels `a` to `z` of the tile under the groups before; `again`: and start another."""
    zero, one = pixel.dtype.type(0), pixel.dtype.type(1)
    half = one / (one + one)
    for p in range(_at(a), _at(z)):
        t, cover = pixel[p + _LIGHT_BEFORE], pixel[p + _COVER]
        light = pixel[p + _LIGHT]
        light = t * _pick(cover < half, one - cover, light)
        red = pixel[p + _RED_BEFORE] + t * pixel[p + _RED]
        green = pixel[p + _GREEN_BEFORE] + t * pixel[p + _GREEN]
        blue = pixel[p + _BLUE_BEFORE] + t * pixel[p + _BLUE]
        if again:
            pixel[p + _LIGHT_BEFORE] = light
            pixel[p + _RED_BEFORE] = red
            pixel[p + _GREEN_BEFORE] = green
            pixel[p + _BLUE_BEFORE] = blue
            light, red, green, blue = one, zero, zero, zero
        pixel[p + _LIGHT] = light
        pixel[p + _RED] = red
        pixel[p + _GREEN] = green
        pixel[p + _BLUE] = blue
        pixel[p + _COVER] = zero


@_compiled(_EXACT, forceinline=True)
def _back(entry, a, cr, cg, cb, spots, store, pixel, sums):
    """Add what a triangle's pairs pull at it to `sums`; what is below moves up."""
    none = _all(store.dtype.type(0), 0)
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10 = (
        none, none, none, none, none, none, none, none, none, none, none,
    )  # fmt: skip
    for block in range(entry[3], entry[4]):
        j, p = _at(block * _PAIRS), _at(spots[_at(block)])
        v, t, d = _load(store, j + _W), _load(store, j + _ABOVE), _load(pixel, p + _BELOW)
        r, g, b = _load(pixel, p + _GR), _load(pixel, p + _GG), _load(pixel, p + _GB)
        lead = r * cr + g * cg + (b * cb + _load(pixel, p + _GA)) - d
        _store(pixel, p + _BELOW, d + v * lead)
        wt = v * t
        s0 = s0 + r * wt
        s1 = s1 + g * wt
        s2 = s2 + b * wt
        dw = t * lead
        px, py = dw * _load(store, j + _GX), dw * _load(store, j + _GY)
        b0, b1 = _load(store, j + _W0), _load(store, j + _W1)
        s3 = s3 + dw * v
        s4 = s4 + px
        s5 = s5 + py
        s6 = s6 + px * b0
        s7 = s7 + py * b0
        s8 = s8 + px * b1
        s9 = s9 + py * b1
        s10 = s10 + dw * _load(store, j + _WS)
    if entry[5] < entry[6]:
        t0, t1, t2, t3 = none, none, none, none
        for block in range(entry[5], entry[6]):
            p = _at(spots[_at(block)])
            t, d = _load(store, _at(block * BLOCK + _SOLID)), _load(pixel, p + _BELOW)
            r, g, b = _load(pixel, p + _GR), _load(pixel, p + _GG), _load(pixel, p + _GB)
            lead = r * cr + g * cg + (b * cb + _load(pixel, p + _GA)) - d
            _store(pixel, p + _BELOW, d + lead * a)
            t0 = t0 + r * t
            t1 = t1 + g * t
            t2 = t2 + b * t
            t3 = t3 + lead * t
        s0, s1, s2, s3 = s0 + t0 * a, s1 + t1 * a, s2 + t2 * a, s3 + t3 * a
    sums[0] += _total(s0)
    sums[1] += _total(s1)
    sums[2] += _total(s2)
    sums[3] += _total(s3)
    sums[4] += _total(s4)
    sums[5] += _total(s5)
    sums[6] += _total(s6)
    sums[7] += _total(s7)
    sums[8] += _total(s8)
    sums[9] += _total(s9)
    sums[10] += _total(s10)


# --- a tile ---------------------------------------------------------------------------------------

FORWARD, BACKWARD, FUSED = 0, 1, 2


@_compiled(_EXACT)
def _list_tile(ids, count, geo, x0, y0, width, height, columns, rows, entries, spans, pairs):
    """The triangles of a segment's list that touch the tile, and their spans on its rows."""
    n = 0
    left, right = (x0 + 0.5) / width, (x0 + columns - 0.5) / width
    py, row_height = (y0 + 0.5) / height, 1.0 / height
    for r in range(TILE_H):
        pairs[r] = 0.0
    for i in range(count):
        t = ids[i]
        g = geo[t]
        if g[_LEFT] > right or g[_RIGHT] < left:
            continue
        top, bottom = g[_TOP] * height - y0 - 0.51, g[_BOTTOM] * height - y0 - 0.49
        if top > rows - 1.0 or bottom < 0.0:
            continue
        first, last = np.int64(math.ceil(max(top, 0.0))), np.int64(min(bottom, rows - 1.0)) + 1
        if _span_rows(g, left, py, width, row_height, columns, first, last, spans[n], pairs) > 0.0:
            entries[n, 0], entries[n, 1], entries[n, 2] = t, first, last
            n += 1
    return n


@_compiled(_EXACT)
def _cut(g, x0, y0, width, height, first, last, spots, store):
    """Leave out pixels whose centres lie outside the padded bounding box: spans go beyond it."""
    for block in range(first, last):
        r, x = spots[block] // _STRIDE, spots[block] % _STRIDE
        py = (y0 + r + 0.5) / height
        outside = py < g[_TOP] or py > g[_BOTTOM]
        for i in range(BLOCK):
            px = (x0 + x + i + 0.5) / width
            if outside or px < g[_LEFT] or px > g[_RIGHT]:
                j = _at(block * _PAIRS + i)
                store[j + _W] = store[j + _GX] = store[j + _GY] = store[j + _WS] = 0.0


@_compiled(_EXACT)
def _brightest(deep, pixel, first_row, last_row, columns):
    """The largest transmittance of the rows."""
    most = pixel.dtype.type(0)
    for r in range(first_row, last_row):
        q = _at(r * _STRIDE)
        for x in range(_at(columns)):
            t = pixel[q + x]
            if deep:
                t *= pixel[q + x + _LIGHT_BEFORE]
            most = _pick(t > most, t, most)
    return most


@_compiled(_EXACT)
def _draw_tile(
    forward, compact, bbox, n, entries, spans, params, geo, x0, y0, width, height, columns,
    first_row, last_row, k, rows, spots, store, pixel,
):  # fmt: skip
    """Front to back: returns how many entries were drawn before nothing shone through."""
    enough = 1e-10 if params.itemsize == 4 else 1e-18
    a, z = first_row * _STRIDE, last_row * _STRIDE
    pixel[a:z] = 1.0
    for plane in range(1, 4):
        pixel[plane * _PLANE + a : plane * _PLANE + z] = 0.0
    deep = n > _GROUP
    if deep:
        pixel[9 * _PLANE + a : 9 * _PLANE + z] = 1.0
        for plane in range(10, 14):
            pixel[plane * _PLANE + a : plane * _PLANE + z] = 0.0
    kind = k.dtype.type
    px, py = (x0 + 0.5) / width, (y0 + 0.5) / height
    column_width, row_height = 1.0 / width, 1.0 / height
    at, solid = 0, ROOM // BLOCK
    for start in range(0, n, 8):
        if start > 0:
            # What a colour 1e10 times as bright would add is looked for no more.
            if _brightest(deep, pixel, first_row, last_row, columns) < enough:
                n = start
                break
            if start % _GROUP == 0:
                _close_group(a, z, True, pixel)
        end = min(start + 8, n)
        if forward:
            at, solid = 0, ROOM // BLOCK
        for e in range(start, end):
            entry, span = entries[e], spans[e]
            entry[3], entry[6] = at, solid
            t = entry[0]
            first, last = max(entry[1], first_row), min(entry[2], last_row)
            if first < last:
                g = geo[t]
                _constants(g, px, py, width, column_width, row_height, first, last, k, rows)
                # Each is compiled for itself, without a branch among its vectors.
                if forward:
                    at, solid = _place(first, last, span, at, solid, False, k, rows, spots, store)
                else:
                    at, solid = _place(first, last, span, at, solid, True, k, rows, spots, store)
            entry[4], entry[5] = at, solid
        for e in range(start, end):
            entry = entries[e]
            g = geo[entry[0]]
            inverse = kind(g[_INVERSE] / (2.0 * COMPACT_RADIUS) if compact else g[_INVERSE])
            _cover(entry[3], entry[4], inverse, kind(g[_ALPHA]), compact, not forward, store)
            if bbox:
                _cut(g, x0, y0, width, height, entry[3], entry[4], spots, store)
        for e in range(start, end):
            entry = entries[e]
            t = entry[0]
            _blend(
                entry, kind(geo[t, _ALPHA]), params[t, 6], params[t, 7], params[t, 8], deep, spots,
                store, pixel,
            )  # fmt: skip
    if deep:
        _close_group(a, z, False, pixel)
    return n


@_compiled(_EXACT)
def _write_tile(background, images, x0, y0, columns, first_row, last_row, pixel):
    """Put the background below, and write the image."""
    br, bg, bb = background[0], background[1], background[2]
    one = pixel.dtype.type(1)
    for r in range(first_row, last_row):
        q = _at(r * _STRIDE)
        row = images[y0 + r]
        for x in range(_at(columns)):
            t, i = pixel[q + x], _at(x0) + x
            row[i, 0] = pixel[q + x + _RED] + br * t
            row[i, 1] = pixel[q + x + _GREEN] + bg * t
            row[i, 2] = pixel[q + x + _BLUE] + bb * t
        if images.shape[2] == 4:
            for x in range(_at(columns)):
                row[_at(x0) + x, 3] = one - pixel[q + x]


@_compiled(_SUMS)
def _compare_tile(
    fused, background, given, x0, y0, columns, first_row, last_row, scale, pixel, sums
):
    """Put the background below, make dL/dC, and start the way back with the background."""
    br, bg, bb = background[0], background[1], background[2]
    zero, two = pixel.dtype.type(0), pixel.dtype.type(2 * scale)
    n, channels = _at(columns), given.shape[2]
    for r in range(first_row, last_row):
        q = _at(r * _STRIDE)
        row, at = given[y0 + r].reshape(-1), _at(x0 * channels)
        loss, s0, s1, s2 = zero, zero, zero, zero
        # At fixed strides the compiler reads vectors and shuffles them.
        if fused:
            for x in range(n):
                p, i = q + x, at + _at(3) * x
                t = pixel[p]
                dr = pixel[p + _RED] + br * t - row[i]
                dg = pixel[p + _GREEN] + bg * t - row[i + _at(1)]
                db = pixel[p + _BLUE] + bb * t - row[i + _at(2)]
                loss += dr * dr + dg * dg + db * db
                dr, dg, db = dr * two, dg * two, db * two
                pixel[p + _GR] = dr
                pixel[p + _GG] = dg
                pixel[p + _GB] = db
                pixel[p + _BELOW] = dr * br + dg * bg + db * bb
                s0 += dr * t
                s1 += dg * t
                s2 += db * t
        else:
            if channels == 3:
                for x in range(n):
                    p, i = q + x, at + _at(3) * x
                    pixel[p + _GR] = row[i]
                    pixel[p + _GG] = row[i + _at(1)]
                    pixel[p + _GB] = row[i + _at(2)]
            else:
                for x in range(n):
                    p, i = q + x, at + _at(4) * x
                    pixel[p + _GR] = row[i]
                    pixel[p + _GG] = row[i + _at(1)]
                    pixel[p + _GB] = row[i + _at(2)]
                    pixel[p + _GA] = row[i + _at(3)]
            for x in range(n):
                p = q + x
                t = pixel[p]
                dr, dg, db = pixel[p + _GR], pixel[p + _GG], pixel[p + _GB]
                pixel[p + _BELOW] = dr * br + dg * bg + db * bb
                s0 += dr * t
                s1 += dg * t
                s2 += db * t
        # The last block of a span may reach beyond the tile, where there is no gradient.
        for x in range(n, n + _at(BLOCK)):
            p = q + x
            pixel[p + _GR] = pixel[p + _GG] = pixel[p + _GB] = pixel[p + _BELOW] = zero
            pixel[p + _GA] = zero
        sums[0] += s0
        sums[1] += s1
        sums[2] += s2
        sums[3] += np.float64(loss) * scale


@_compiled(_EXACT)
def _back_tile(n, entries, params, geo, spots, store, pixel, sums):
    """Back to front over what `_draw_tile` stored; adds to the triangles' rows of `sums`."""
    for e in range(n - 1, -1, -1):
        entry = entries[e]
        t = entry[0]
        if entry[3] < entry[4] or entry[5] < entry[6]:
            _back(
                entry, params.dtype.type(geo[t, _ALPHA]), params[t, 6], params[t, 7],
                params[t, 8], spots, store, pixel, sums[t],
            )  # fmt: skip


# --- an item --------------------------------------------------------------------------------------


@_compiled(_EXACT)
def draw(
    mode, compact, bbox, params, geo, background, given, images, first, last, lists, spans, spots,
    store, pixel, sums, part,
):  # fmt: skip
    """Draw segments `first` to `last` of one item, in order.

    Args:
        mode: FORWARD writes `images`; BACKWARD and FUSED add to `sums`.
        compact: The kernel is the compact one.
        bbox: Cut at the padded bounding box.
        params: [T, 10].
        geo: [T, GEO], from `setup`.
        background: [3].
        given: [H, W, C]: dL/dC, or the target.
        images: [H, W, C], written when drawing forward.
        lists: [T, LISTS] int64, scratch, as are the next three.
        spans: [T, SPAN].
        spots: [ROOM / BLOCK] int64: the pixel at which each stored block begins.
        store: [FIELDS · ROOM], in which pairs are kept; little of it is touched.
        pixel: [PIXELS].
        sums: [T + 1, ACC] float64, added to; the last row: background r g b, loss.
        part: As `sums`, scratch.
    Returns:
        False where more than ROOM / 8 triangles may cover a pixel.
    """
    triangles = params.shape[0]
    shape = images.shape if mode == FORWARD else given.shape
    height, width = shape[0], shape[1]
    scale = 1.0 / (3.0 * height * width)
    segment_h = segment_rows(height)
    pixel[7 * _PLANE : 8 * _PLANE] = 0.0  # dL/dalpha, and it stays so where images have none
    ids, entries = lists[:, 7], lists[:, :7]
    pairs = np.empty(TILE_H)
    k = np.empty(_CONSTANTS, params.dtype)
    rows = np.empty(_ROWS, params.dtype)
    for segment in range(first, last):
        top = segment * segment_h
        bottom = min(top + segment_h, height)
        count = 0
        from_y, to_y = (top + 0.5) / height, (bottom - 0.5) / height
        for t in range(triangles - 1, -1, -1):
            g = geo[t]
            if g[_LIVE] == 0.0 or g[_TOP] > to_y or g[_BOTTOM] < from_y:
                continue
            ids[count] = t
            count += 1
            if mode != FORWARD:
                part[t] = 0.0
        if mode != FORWARD:
            part[triangles] = 0.0
        # Where a row of a tile could have more pairs than there is room for, tiles are narrow.
        tile_w = TILE_W if count <= ROOM // TILE_W else BLOCK
        if count > ROOM // BLOCK:
            return False
        for y0 in range(top, bottom, TILE_H):
            tile_rows = min(TILE_H, bottom - y0)
            for x0 in range(0, width, tile_w):
                columns = min(tile_w, width - x0)
                n = _list_tile(
                    ids, count, geo, x0, y0, width, height, columns, tile_rows,
                    entries, spans, pairs,
                )  # fmt: skip
                first_row = 0
                while first_row < tile_rows:
                    # As many rows at once as stay in the cache; one at least.
                    last_row, held = first_row + 1, pairs[first_row]
                    while last_row < tile_rows and (
                        mode == FORWARD or held + pairs[last_row] <= _CHUNK
                    ):
                        held += pairs[last_row]
                        last_row += 1
                    done = _draw_tile(
                        mode == FORWARD, compact, bbox, n, entries, spans, params, geo, x0, y0,
                        width, height, columns, first_row, last_row, k, rows, spots, store,
                        pixel,
                    )  # fmt: skip
                    if mode == FORWARD:
                        _write_tile(background, images, x0, y0, columns, first_row, last_row, pixel)
                    else:
                        _compare_tile(
                            mode == FUSED, background, given, x0, y0, columns, first_row,
                            last_row, scale, pixel, part[triangles],
                        )  # fmt: skip
                        _back_tile(done, entries, params, geo, spots, store, pixel, part)
                    first_row = last_row
        if mode != FORWARD:
            for i in range(count):
                t = ids[i]
                for j in range(ACC):
                    sums[t, j] += part[t, j]
            for j in range(ACC):
                sums[triangles, j] += part[triangles, j]
    return True


@_compiled(_EXACT)
def finish(parts, geo, grads, grad_sigma, grad_background, loss):
    """Add an item's parts in order and turn the sums into gradients.

    Args:
        parts: [P, T + 1, ACC] float64.
        geo: [T, GEO].
        grads: [T, 10], written.
        grad_sigma: [T], written.
        grad_background: [3], written.
        loss: [1], written.
    """
    triangles = geo.shape[0]
    s = np.empty(ACC)
    for t in range(triangles + 1):
        s[:] = 0.0
        for p in range(parts.shape[0]):
            for j in range(ACC):
                s[j] += parts[p, t, j]
        if t == triangles:
            for j in range(3):
                grad_background[j] = s[j]
            loss[0] = s[3]
            break
        g = geo[t]
        if g[_LIVE] == 0.0:
            grads[t] = 0.0
            grad_sigma[t] = 0.0
            continue
        a, inverse = g[_ALPHA], g[_INVERSE]
        # dsd/dV = -weight · direction; the three weights of a pixel sum to 1.
        f = -a * inverse
        grads[t, 0], grads[t, 1] = f * s[6], f * s[7]
        grads[t, 2], grads[t, 3] = f * s[8], f * s[9]
        grads[t, 4], grads[t, 5] = f * (s[4] - s[6] - s[8]), f * (s[5] - s[7] - s[9])
        for j in range(3):
            grads[t, 6 + j] = s[j]
        grads[t, 9] = s[3] / a if g[_OPEN] else 0.0
        grad_sigma[t] = f * inverse * s[10]


@_compiled(_EXACT)
def wait(bell, seen, patience):
    """Until `bell[0]` is no longer `seen`, or so many looks were taken; returns what it is."""
    for _ in range(patience):
        if _look(bell, 0) != seen:
            break
    return _look(bell, 0)


@_compiled(_EXACT)
def take_part(
    bell, call, desk, segments, each, mode, compact, bbox, params, sigma, counts, geo, background,
    given, images, lists, spans, spots, store, pixel, sums, part, shared, grads, grad_sigma,
    grad_background, losses,
):  # fmt: skip
    """Draw what of a batch no other thread has begun, and go on until all is begun.

    Args:
        bell: [1] int64, set to `call` where that is not 0: others may then take part.
        call: Not 0 for the thread that called, which also waits for the others and finishes.
        desk: [5] int64, zero at first: next unit, who came, who left, 1 if there was no room, 1
            when others may begin.
        segments: How many an item has, where units are segments; 0 where they are items.
        each: Items a unit.
        sums: [1, T + 1, ACC], scratch, as are `lists` to `part`; see `draw`.
        shared: [B, segments, T + 1, ACC] zeros, where units are segments.
    Others are as for `draw` and `finish`, with the batch before them.
    """
    batch = params.shape[0]
    triangles = params.shape[1]
    height = images.shape[1] if mode == FORWARD else given.shape[1]
    rows = segment_rows(height)
    units = batch * segments if segments > 0 else (batch + each - 1) // each
    if call != 0:
        if segments > 0:
            setup(params, sigma, counts, compact, bbox, geo, 0, batch * triangles)
        _tell(desk, 4, 1)
        _tell(bell, 0, call)
    elif _look(desk, 4) == 0:
        return  # rung for by another call
    _next(desk, 1)
    while True:
        unit = _next(desk, 0)
        if unit >= units:
            break
        if segments > 0:
            item, segment = unit // segments, unit % segments
            fits = draw(
                mode, compact, bbox, params[item], geo[item], background[item],
                given[0 if mode == FORWARD else item], images[item if mode == FORWARD else 0],
                segment, segment + 1, lists, spans, spots, store, pixel, shared[item, segment],
                part,
            )  # fmt: skip
            if not fits:
                _tell(desk, 3, 1)
            continue
        for item in range(unit * each, min((unit + 1) * each, batch)):
            setup(
                params, sigma, counts, compact, bbox, geo, item * triangles, (item + 1) * triangles
            )
            if mode != FORWARD:
                sums[:] = 0.0
            fits = draw(
                mode, compact, bbox, params[item], geo[item], background[item],
                given[0 if mode == FORWARD else item], images[item if mode == FORWARD else 0],
                0, (height + rows - 1) // rows, lists, spans, spots, store, pixel, sums[0], part,
            )  # fmt: skip
            if not fits:
                _tell(desk, 3, 1)
            if mode != FORWARD:
                finish(
                    sums, geo[item], grads[item], grad_sigma[item], grad_background[item],
                    losses[item : item + 1],
                )  # fmt: skip
    _next(desk, 2)
    if call != 0:
        # Whoever comes later finds nothing to do.
        while _look(desk, 2) < _look(desk, 1):
            pass
        if segments > 0 and mode != FORWARD:
            for item in range(batch):
                finish(
                    shared[item], geo[item], grads[item], grad_sigma[item], grad_background[item],
                    losses[item : item + 1],
                )  # fmt: skip
