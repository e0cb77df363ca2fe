"""The grid model's training step as compiled loops: rows in, gradients out, and Adam's update.

What autograd does in some forty passes over a batch, these do in one pass over blocks of 128 rows
that stay in the first-level cache: three plane lookups and one of the volume, the ReLU network, the
weighted loss in log space, and all of it backwards. On one thread a step of 4,096 rows takes 1.1 to
1.5 ms, torch's 2.4 to 2.6 times as long (`benchmarks/step.py`; see docs/performance.md).

Texels are [..., 4] float32, contiguous; rows should come sorted by t, since a fine volume is larger
than the second-level cache: in any order a pass takes some 6 % longer. Every function is
compiled when this module is imported (about 15 s the first time, then read from Numba's cache).
Sums run in a fixed order, so the same rows give the same bits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
# The signatures that are compiled stand above each function.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, void

__all__ = [
    "adam_step",
    "bend_columns",
    "bend_rows",
    "draw",
    "rows_pass",
    "spline_down",
    "spline_up",
]

BLOCK = 128
_FAST = {"contract", "reassoc", "arcp", "nsz"}
# Not nnan and ninf: whether a number is finite must stay a question that can be asked.
_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_at = np.uintp  # an unsigned index: Numba then emits no check for negative ones

_f1, _f2, _f3, _f4 = (float32[::1], float32[:, ::1], float32[:, :, ::1], float32[:, :, :, ::1])
_i2 = int32[:, ::1]


def _compiled(*signature: Any) -> Any:
    compiler: Any = njit  # its stubs know no set of fast-math flags
    return compiler(*signature, fastmath=_FAST, error_model="numpy", nogil=True, cache=True)


# --- the network, [units, rows of the block] ------------------------------------------------------


@_compiled(void(_f2, _f1, _f2, _f2, int64))
def _affine(weight, bias, x, y, n):
    """y = weight @ x + bias: two outputs and four inputs at a time, vectorised over rows."""
    outputs, inputs = weight.shape
    for j in range(0, outputs, 2):
        i = min(j + 1, outputs - 1)
        first, second = y[j], y[i]
        for b in range(n):
            first[b] = bias[j]
        for b in range(n):
            second[b] = bias[i]
        k = 0
        while k + 4 <= inputs and i != j:
            p0, p1, p2, p3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            u0, u1, u2, u3 = weight[j, k], weight[j, k + 1], weight[j, k + 2], weight[j, k + 3]
            v0, v1, v2, v3 = weight[i, k], weight[i, k + 1], weight[i, k + 2], weight[i, k + 3]
            for b in range(n):
                q0, q1, q2, q3 = p0[b], p1[b], p2[b], p3[b]
                first[b] += u0 * q0 + u1 * q1 + u2 * q2 + u3 * q3
                second[b] += v0 * q0 + v1 * q1 + v2 * q2 + v3 * q3
            k += 4
        while k < inputs:
            p0 = x[k]
            u0 = weight[j, k]
            for b in range(n):
                first[b] += u0 * p0[b]
            if i != j:
                v0 = weight[i, k]
                for b in range(n):
                    second[b] += v0 * p0[b]
            k += 1


@_compiled(void(_f2, int64))
def _relu(y, n):
    for j in range(y.shape[0]):
        unit = y[j]
        for b in range(n):
            unit[b] = max(unit[b], _ZERO)


@_compiled(void(_f2, _f2, int64))
def _mask(gradient, output, n):
    """Zero the gradient where the ReLU was shut."""
    for j in range(gradient.shape[0]):
        unit, passed = gradient[j], output[j]
        for b in range(n):
            unit[b] = unit[b] if passed[b] > _ZERO else _ZERO


@_compiled(void(_f2, _f2, _f2, int64, int64))
def _back_inputs(weight, gradient, x, inputs, n):
    """x[k] = sum over j of weight[j, k] gradient[j], for the first `inputs` inputs."""
    outputs = weight.shape[0]
    for k in range(inputs):
        unit = x[k]
        for b in range(n):
            unit[b] = _ZERO
        j = 0
        while j + 4 <= outputs:
            p0, p1, p2, p3 = gradient[j], gradient[j + 1], gradient[j + 2], gradient[j + 3]
            u0, u1, u2, u3 = weight[j, k], weight[j + 1, k], weight[j + 2, k], weight[j + 3, k]
            for b in range(n):
                unit[b] += u0 * p0[b] + u1 * p1[b] + u2 * p2[b] + u3 * p3[b]
            j += 4
        while j < outputs:
            p0 = gradient[j]
            u0 = weight[j, k]
            for b in range(n):
                unit[b] += u0 * p0[b]
            j += 1


@_compiled(void(_f2, _f2, _f2, _f1, int64))
def _back_weights(gradient, x, weight, bias, n):
    """Add the block's gradients of weight and bias."""
    inputs = x.shape[0]
    for j in range(gradient.shape[0]):
        unit = gradient[j]
        s0 = _ZERO
        for b in range(n):
            s0 += unit[b]
        bias[j] += s0
        k = 0
        while k + 4 <= inputs:
            p0, p1, p2, p3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for b in range(n):
                g = unit[b]
                s0 += g * p0[b]
                s1 += g * p1[b]
                s2 += g * p2[b]
                s3 += g * p3[b]
            weight[j, k] += s0
            weight[j, k + 1] += s1
            weight[j, k + 2] += s2
            weight[j, k + 3] += s3
            k += 4
        while k < inputs:
            p0 = x[k]
            s0 = _ZERO
            for b in range(n):
                s0 += unit[b] * p0[b]
            weight[j, k] += s0
            k += 1


# --- lookups: linear, clamp to edge, texel centre i of N at (2i + 1)/N - 1 ------------------------


@_compiled()
def _place(u, count):
    """Lower texel and the way to the next, 0..1."""
    p = ((u + _ONE) * np.float32(count) - _ONE) * _HALF
    p = min(max(p, _ZERO), np.float32(count - 1))
    i = min(np.int64(p), max(count - 2, 0))
    return i, p - np.float32(i)


@_compiled()
def _look2(texels, rows, columns, u, v, features, c, where, part, o, b):
    j, fx = _place(u, columns)
    i, fy = _place(v, rows)
    base = 4 * (i * columns + j)
    right = 4 if columns > 1 else 0
    down = 4 * columns if rows > 1 else 0
    w0, w1, w2, w3 = (_ONE - fx) * (_ONE - fy), fx * (_ONE - fy), (_ONE - fx) * fy, fx * fy
    where[o, b] = base
    part[2 * o, b] = fx
    part[2 * o + 1, b] = fy
    a0, a1, a2, a3 = _at(base), _at(base + right), _at(base + down), _at(base + down + right)
    for k in range(4):
        q = _at(k)
        features[c + k, b] = (
            w0 * texels[a0 + q] + w1 * texels[a1 + q] + w2 * texels[a2 + q] + w3 * texels[a3 + q]
        )


@_compiled()
def _add4(texels, base, w, d0, d1, d2, d3):
    p = _at(base)
    texels[p] += w * d0
    texels[p + _at(1)] += w * d1
    texels[p + _at(2)] += w * d2
    texels[p + _at(3)] += w * d3


@_compiled()
def _spread2(texels, rows, columns, gradient, c, where, part, o, b):
    base = where[o, b]
    fx, fy = part[2 * o, b], part[2 * o + 1, b]
    right = 4 if columns > 1 else 0
    down = 4 * columns if rows > 1 else 0
    d0, d1, d2, d3 = gradient[c, b], gradient[c + 1, b], gradient[c + 2, b], gradient[c + 3, b]
    _add4(texels, base, (_ONE - fx) * (_ONE - fy), d0, d1, d2, d3)
    _add4(texels, base + right, fx * (_ONE - fy), d0, d1, d2, d3)
    _add4(texels, base + down, (_ONE - fx) * fy, d0, d1, d2, d3)
    _add4(texels, base + down + right, fx * fy, d0, d1, d2, d3)


@_compiled()
def _look3(texels, slices, rows, columns, x, y, t, features, c, where, part, b):
    j, fx = _place(x, columns)
    i, fy = _place(y, rows)
    z, fz = _place(t, slices)
    base = 4 * ((z * rows + i) * columns + j)
    where[3, b] = base
    part[6, b], part[7, b], part[8, b] = fx, fy, fz
    right = 4 if columns > 1 else 0
    down = 4 * columns if rows > 1 else 0
    deep = 4 * columns * rows if slices > 1 else 0
    w0, w1, w2, w3 = (_ONE - fx) * (_ONE - fy), fx * (_ONE - fy), (_ONE - fx) * fy, fx * fy
    a0, a1, a2, a3 = _at(base), _at(base + right), _at(base + down), _at(base + down + right)
    d = _at(deep)
    for k in range(4):
        q = _at(k)
        near = w0 * texels[a0 + q] + w1 * texels[a1 + q] + w2 * texels[a2 + q] + w3 * texels[a3 + q]
        q += d
        far = w0 * texels[a0 + q] + w1 * texels[a1 + q] + w2 * texels[a2 + q] + w3 * texels[a3 + q]
        features[c + k, b] = near + fz * (far - near)


@_compiled()
def _spread3(texels, slices, rows, columns, gradient, c, where, part, b):
    base = where[3, b]
    fx, fy, fz = part[6, b], part[7, b], part[8, b]
    right = 4 if columns > 1 else 0
    down = 4 * columns if rows > 1 else 0
    deep = 4 * columns * rows if slices > 1 else 0
    d0, d1, d2, d3 = gradient[c, b], gradient[c + 1, b], gradient[c + 2, b], gradient[c + 3, b]
    w0, w1, w2, w3 = (_ONE - fx) * (_ONE - fy), fx * (_ONE - fy), (_ONE - fx) * fy, fx * fy
    near = _ONE - fz
    _add4(texels, base, near * w0, d0, d1, d2, d3)
    _add4(texels, base + right, near * w1, d0, d1, d2, d3)
    _add4(texels, base + down, near * w2, d0, d1, d2, d3)
    _add4(texels, base + down + right, near * w3, d0, d1, d2, d3)
    base += deep
    _add4(texels, base, fz * w0, d0, d1, d2, d3)
    _add4(texels, base + right, fz * w1, d0, d1, d2, d3)
    _add4(texels, base + down, fz * w2, d0, d1, d2, d3)
    _add4(texels, base + down + right, fz * w3, d0, d1, d2, d3)


# --- the whole pass -------------------------------------------------------------------------------

_TEXELS = (_f3, _f3, _f3, _f4)
_NETWORK = (_f2, _f1, _f3, _f2, _f2, _f1)


@_compiled(
    float64(_f2, _f1, float32, int64, *_TEXELS, *_NETWORK, *_TEXELS, *_NETWORK, _f1)
)  # fmt: skip
def rows_pass(
    rows, weights, relative, total,
    xy, xt, yt, volume, first, first_bias, middle, middle_bias, last, last_bias,
    g_xy, g_xt, g_yt, g_volume, g_first, g_first_bias, g_middle, g_middle_bias, g_last, g_last_bias,
    errors,
):  # fmt: skip
    """Loss of rows x, y, t and log-space RGB, [n, 6], and its gradients, which are added.

    The loss is the mean over `total` rows of weight * mean over channels of
    ((o - c) / (min(|c|, 1) + relative))^2; `total` may be more than n where threads share a batch.

    Args:
        middle, middle_bias: Hidden layers after the first, [layers - 1, units, units] and
            [layers - 1, units].
        errors: Filled with each row's own loss before its weight, [n].
    Returns:
        This call's share of the loss.
    """
    n, inputs, units, layers = len(rows), first.shape[1], first.shape[0], middle.shape[0]
    f_xy, f_xt, f_yt, f_volume = xy.ravel(), xt.ravel(), yt.ravel(), volume.ravel()
    h_xy, h_xt, h_yt, h_volume = g_xy.ravel(), g_xt.ravel(), g_yt.ravel(), g_volume.ravel()
    features = np.empty((inputs, BLOCK), np.float32)
    g_features = np.empty((inputs, BLOCK), np.float32)
    hidden = np.empty((layers + 1, units, BLOCK), np.float32)
    gradient = np.empty((units, BLOCK), np.float32)
    before = np.empty((units, BLOCK), np.float32)
    out = np.empty((3, BLOCK), np.float32)
    where = np.empty((4, BLOCK), np.int64)
    part = np.empty((9, BLOCK), np.float32)
    scale = _TWO / np.float32(3 * total)
    loss = 0.0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        for b in range(m):
            x, y, t = rows[start + b, 0], rows[start + b, 1], rows[start + b, 2]
            _look2(f_xy, xy.shape[0], xy.shape[1], x, y, features, 0, where, part, 0, b)
            _look2(f_xt, xt.shape[0], xt.shape[1], x, t, features, 4, where, part, 1, b)
            _look2(f_yt, yt.shape[0], yt.shape[1], y, t, features, 8, where, part, 2, b)
            _look3(
                f_volume, volume.shape[0], volume.shape[1], volume.shape[2],
                x, y, t, features, 12, where, part, b,
            )  # fmt: skip
            features[16, b], features[17, b], features[18, b] = x, y, t
        _affine(first, first_bias, features, hidden[0], m)
        _relu(hidden[0], m)
        for i in range(layers):
            _affine(middle[i], middle_bias[i], hidden[i], hidden[i + 1], m)
            _relu(hidden[i + 1], m)
        _affine(last, last_bias, hidden[layers], out, m)
        for b in range(m):
            weight, own = weights[start + b], _ZERO
            for c in range(3):
                true = rows[start + b, 3 + c]
                soft = _ONE / (min(abs(true), _ONE) + relative)
                error = (out[c, b] - true) * soft
                own += error * error
                out[c, b] = error * soft * weight * scale
            errors[start + b] = own
            loss += own * weight
        _back_weights(out, hidden[layers], g_last, g_last_bias, m)
        _back_inputs(last, out, gradient, units, m)
        _mask(gradient, hidden[layers], m)
        for i in range(layers - 1, -1, -1):
            _back_weights(gradient, hidden[i], g_middle[i], g_middle_bias[i], m)
            _back_inputs(middle[i], gradient, before, units, m)
            _mask(before, hidden[i], m)
            gradient, before = before, gradient
        _back_weights(gradient, features, g_first, g_first_bias, m)
        _back_inputs(first, gradient, g_features, 16, m)
        for b in range(m):
            _spread2(h_xy, xy.shape[0], xy.shape[1], g_features, 0, where, part, 0, b)
            _spread2(h_xt, xt.shape[0], xt.shape[1], g_features, 4, where, part, 1, b)
            _spread2(h_yt, yt.shape[0], yt.shape[1], g_features, 8, where, part, 2, b)
            _spread3(
                h_volume, volume.shape[0], volume.shape[1], volume.shape[2],
                g_features, 12, where, part, b,
            )  # fmt: skip
    return loss / (3.0 * total)


@_compiled(void(_f1, _f1, _f1, _f1, _f1, float32, float32, float32, float64, float32))
def adam_step(value, gradient, first, second, average, rate, beta1, beta2, count, keep):
    """Adam (Kingma and Ba 2015), the running average of the weights, and the gradient cleared.

    Args:
        count: Steps so far, this one included, for the bias correction.
        keep: How much of the average stays.
    """
    step = np.float32(rate / (1.0 - np.float64(beta1) ** count))
    root = np.float32(1.0 / np.sqrt(1.0 - np.float64(beta2) ** count))
    grow1, grow2, fresh = _ONE - beta1, _ONE - beta2, _ONE - keep
    for i in range(value.size):
        g = gradient[i]
        gradient[i] = _ZERO
        m = first[i] + grow1 * (g - first[i])
        v = second[i] + grow2 * (g * g - second[i])
        first[i], second[i] = m, v
        p = value[i] - step * m / (np.sqrt(v) * root + np.float32(1e-8))
        value[i] = p
        average[i] += fresh * (p - average[i])


# --- splines: coarse control points to texels, and gradients back ---------------------------------


@_compiled(void(_f3, _i2, _f2, _i2, _f2, _f3, _f3))
def spline_up(control, rows_at, rows_w, columns_at, columns_w, scratch, texels):
    """Texels [R, C, 4] of control points [r, c, 4]: four taps along each axis.

    Args:
        rows_at, rows_w: Control row and weight of each texel row's taps, [R, 4]; columns alike.
        scratch: [r, C, 4], overwritten.
    """
    for i in range(control.shape[0]):
        line, row = control[i].ravel(), scratch[i].ravel()
        for j in range(texels.shape[1]):
            w0, w1, w2, w3 = columns_w[j, 0], columns_w[j, 1], columns_w[j, 2], columns_w[j, 3]
            a0, a1 = _at(4 * columns_at[j, 0]), _at(4 * columns_at[j, 1])
            a2, a3 = _at(4 * columns_at[j, 2]), _at(4 * columns_at[j, 3])
            at = _at(4 * j)
            for c in range(4):
                q = _at(c)
                row[at + q] = (
                    w0 * line[a0 + q] + w1 * line[a1 + q] + w2 * line[a2 + q] + w3 * line[a3 + q]
                )
    for i in range(texels.shape[0]):
        row = texels[i].ravel()
        p0, p1 = scratch[rows_at[i, 0]].ravel(), scratch[rows_at[i, 1]].ravel()
        p2, p3 = scratch[rows_at[i, 2]].ravel(), scratch[rows_at[i, 3]].ravel()
        w0, w1, w2, w3 = rows_w[i, 0], rows_w[i, 1], rows_w[i, 2], rows_w[i, 3]
        for j in range(row.size):
            row[j] = w0 * p0[j] + w1 * p1[j] + w2 * p2[j] + w3 * p3[j]


@_compiled(void(_f3, _i2, _f2, _i2, _f2, _f3, _f3))
def spline_down(texels, rows_at, rows_w, columns_at, columns_w, scratch, control):
    """The transpose of `spline_up`: gradients of texels added to those of control points."""
    scratch[:] = _ZERO
    for i in range(texels.shape[0]):
        row = texels[i].ravel()
        for k in range(4):
            target, w = scratch[rows_at[i, k]].ravel(), rows_w[i, k]
            if w == _ZERO:
                continue
            for j in range(row.size):
                target[j] += w * row[j]
    for i in range(control.shape[0]):
        line, row = control[i].ravel(), scratch[i].ravel()
        for j in range(texels.shape[1]):
            at = _at(4 * j)
            d0, d1, d2, d3 = row[at], row[at + _at(1)], row[at + _at(2)], row[at + _at(3)]
            for k in range(4):
                _add4(line, 4 * columns_at[j, k], columns_w[j, k], d0, d1, d2, d3)


# --- smoothing ------------------------------------------------------------------------------------


@_compiled(void(_f2, float32, _f2))
def bend_rows(texels, pull, scratch):
    """Pull lines [n, w] towards the straight line through their neighbours along n.

    A gradient step on the squared second difference; `scratch` is [n, w] and overwritten.
    """
    n, width = texels.shape
    for i in range(1, n - 1):
        before, at, after, bend = texels[i - 1], texels[i], texels[i + 1], scratch[i]
        for j in range(width):
            bend[j] = pull * (before[j] + after[j] - _TWO * at[j])
    for i in range(1, n - 1):
        before, at, after, bend = texels[i - 1], texels[i], texels[i + 1], scratch[i]
        for j in range(width):
            before[j] -= bend[j]
            at[j] += _TWO * bend[j]
            after[j] -= bend[j]


@_compiled(void(_f3, float32, _f2))
def bend_columns(texels, pull, scratch):
    """`bend_rows` along the second axis of [m, n, w], line by line."""
    for i in range(texels.shape[0]):
        bend_rows(texels[i], pull, scratch)


# --- drawing rows ---------------------------------------------------------------------------------


@_compiled(
    void(_f2, _f1, int64[::1], int64[::1], int64, _f1, int64, float64, float32, float32,
         _f2, _f1, int64[::1])
)  # fmt: skip
def draw(
    stored, errors, table, sizes, capacity, random, tries, offset, share, power,
    rows, weights, slots,
):  # fmt: skip
    """Draw rows from buckets, evenly along the table and more of those with large errors.

    Sampling-importance-resampling (Rubin 1988), see `Replay.draw`. A row's candidates lie side by
    side in their bucket, whose order is random anyway: one look into memory finds them all.

    Args:
        stored, errors: All rows [slots, 6], and the roots of their last known errors.
        table: Buckets to draw from, ascending, each as often as its weight.
        random: Uniform numbers, [2, rows] flattened.
        offset: A uniform number for the resampling.
        rows, weights, slots: Filled.
    """
    n = len(slots)
    first = np.empty(n, np.int64)  # each group's first candidate, within its bucket
    bucket_of = np.empty(n, np.int64)
    sums = np.empty(n, np.float32)
    total = 0.0
    for i in range(n):
        at = min(np.int64((i + np.float64(random[i])) * len(table) / n), len(table) - 1)
        bucket = table[at]
        size = sizes[bucket]
        inside = min(np.int64(random[n + i] * size), size - 1)
        first[i], bucket_of[i] = inside, bucket
        base = bucket * capacity
        own = _ZERO
        if inside + tries <= size:
            for j in range(tries):
                own += errors[_at(base + inside + j)]
        else:
            for j in range(tries):
                own += errors[base + (inside + j) % size]
        sums[i] = own
        total += own
    mean = np.float32(total / (n * tries))
    even = not mean > _ZERO or not np.isfinite(mean)
    scale = _ZERO if even else share / mean
    least = _ONE if even else _ONE - share
    if even:  # or nothing times infinity would be no number
        sums[:] = _ZERO
        total = 0.0
    step = (least * np.float64(n * tries) + scale * total) / n
    due, passed, i, heavy = offset * step, 0.0, 0, 0.0
    for j in range(n):
        group = np.float64(least * np.float32(tries) + scale * sums[i])
        while passed + group <= due and i < n - 1:
            passed += group
            i += 1
            group = np.float64(least * np.float32(tries) + scale * sums[i])
        base, size, inside = bucket_of[i] * capacity, sizes[bucket_of[i]], first[i]
        reached = passed
        slot, density = base + inside, _ONE
        for k in range(tries):
            place = inside + k
            slot = base + (place if place < size else place % size)
            density = _ONE if even else least + scale * errors[slot]
            reached += density
            if reached > due:
                break
        slots[j] = slot
        weights[j] = _ONE / np.sqrt(density) if power == _HALF else density**-power
        heavy += weights[j]
        due += step
    level = np.float32(n / heavy)
    flat, out = stored.ravel(), rows.ravel()
    for j in range(n):  # a loop of its own: many of its cache misses are then under way at once
        weights[j] *= level
        at, to = _at(6 * slots[j]), _at(6 * j)
        for c in range(6):
            out[to + _at(c)] = flat[at + _at(c)]
