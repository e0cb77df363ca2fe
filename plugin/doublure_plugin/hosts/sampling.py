"""Which pixels a capture samples: an integer hash, the same in WGSL and in NumPy.

pcg3d (Jarzynski and Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020) of thread, capture
number and seed gives two independent 32-bit values; the high half of value * size is a column or
row that is uniform to within 2^-32. Sampling is with replacement, so every pixel of every capture
is equally likely whatever happened before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SAMPLER_WGSL", "sample_pixels"]

SAMPLER_WGSL = """
struct Capture { width: u32, height: u32, count: u32, index: u32, seed: u32, t: f32 }
struct Rows {
    nonfinite: atomic<u32>, nonopaque: atomic<u32>, pad: array<u32, 6>, values: array<f32>,
}

@group(0) @binding(0) var<uniform> capture: Capture;
@group(0) @binding(1) var source: texture_2d<f32>;
@group(0) @binding(2) var<storage, read_write> rows: Rows;

fn pcg3d(start: vec3u) -> vec3u {
    var v = start * 1664525u + 1013904223u;
    v.x += v.y * v.z; v.y += v.z * v.x; v.z += v.x * v.y;
    v = v ^ (v >> vec3u(16u));
    v.x += v.y * v.z; v.y += v.z * v.x; v.z += v.x * v.y;
    return v;
}

// floor(h * n / 2^32) for n < 2^16.
fn scale(h: u32, n: u32) -> u32 {
    return ((h >> 16u) * n + (((h & 0xffffu) * n) >> 16u)) >> 16u;
}

// By its bits: a compiler may assume that arithmetic is never NaN.
fn is_finite(v: f32) -> bool {
    return (bitcast<u32>(v) & 0x7f800000u) != 0x7f800000u;
}

@compute @workgroup_size(64)
fn sample_rows(@builtin(global_invocation_id) id: vec3u) {
    if (id.x >= capture.count) { return; }
    let h = pcg3d(vec3u(id.x, capture.index, capture.seed));
    let pixel = vec2u(scale(h.x, capture.width), scale(h.y, capture.height));
    let c = textureLoad(source, pixel, 0);
    if (!(is_finite(c.x) && is_finite(c.y) && is_finite(c.z) && is_finite(c.w))) {
        atomicAdd(&rows.nonfinite, 1u);
    } else if (abs(c.w - 1.0) > 0.001) {
        atomicAdd(&rows.nonopaque, 1u);
    }
    let p = (2.0 * vec2f(pixel) + 1.0) / vec2f(f32(capture.width), f32(capture.height)) - 1.0;
    let at = id.x * 6u;
    rows.values[at] = p.x;
    rows.values[at + 1u] = p.y;
    rows.values[at + 2u] = capture.t;
    rows.values[at + 3u] = c.x;
    rows.values[at + 4u] = c.y;
    rows.values[at + 5u] = c.z;
}
"""

_UInts = npt.NDArray[np.uint32]


def sample_pixels(
    count: int, width: int, height: int, *, index: int, seed: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Columns and rows, uint32 [count] each, that capture number `index` samples."""
    multiplier, increment = np.uint32(1664525), np.uint32(1013904223)
    x: Any = np.arange(count, dtype=np.uint32) * multiplier + increment
    y: Any = np.full(1, index & 0xFFFFFFFF, np.uint32) * multiplier + increment
    z: Any = np.full(1, seed & 0xFFFFFFFF, np.uint32) * multiplier + increment
    shift = np.uint32(16)
    x = x + y * z
    y = y + z * x
    z = z + x * y
    x, y, z = x ^ (x >> shift), y ^ (y >> shift), z ^ (z >> shift)
    x = x + y * z
    y = y + z * x
    return _scale(x, width), _scale(y, height)


def _scale(h: _UInts, n: int) -> _UInts:
    scaled: _UInts = ((h.astype(np.uint64) * np.uint64(n)) >> np.uint64(32)).astype(np.uint32)
    return scaled
