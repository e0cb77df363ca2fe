"""Flash: black, but for a lamp of radiance 5000 that is on for a hundredth of the range.

Here to break means, scores and sampling: one t in a hundred has all the light there is, and its
neighbours have none. Whoever takes the mean shows a glow that is never there; whoever measures
held-out slices that miss the flash finds that black is perfect.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["FLASH"]

# The lit hundredth begins and ends at full strength: it is a switch.
_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    let on = select(0.0, 1.0, t >= 0.495 && t < 0.505);
    let a = p - vec2f(-0.2 + 8.0 * (t - 0.5), 0.15);
    let r = a.x * a.x + a.y * a.y;
    let lamp = 5000.0 * exp(-900.0 * r);
    let glare = 40.0 * exp(-30.0 * r) + 1.5 / (1.0 + 6.0 * r);
    // Six streaks, as the blades of a shutter draw them.
    let c = a.x * a.x * a.x - 3.0 * a.x * a.y * a.y;
    let streak = 12.0 * exp(-3.0 * r) / (1.0 + 4e5 * c * c);
    return on * vec3f(
        lamp + glare + streak,
        0.85 * lamp + 0.75 * glare + 0.8 * streak,
        0.6 * lamp + 0.5 * glare + 0.9 * streak
    );
}
"""


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    on = ((t >= np.float32(0.495)) & (t < np.float32(0.505))).astype(np.float32)
    ax, ay = x - (-0.2 + 8.0 * (t - 0.5)), y - 0.15
    r = ax * ax + ay * ay
    lamp = 5000.0 * np.exp(-900.0 * r)
    glare = 40.0 * np.exp(-30.0 * r) + 1.5 / (1.0 + 6.0 * r)
    c = ax * ax * ax - 3.0 * ax * ay * ay
    streak = 12.0 * np.exp(-3.0 * r) / (1.0 + 4e5 * c * c)
    rgb = (
        on * (lamp + glare + streak),
        on * (0.85 * lamp + 0.75 * glare + 0.8 * streak),
        on * (0.6 * lamp + 0.5 * glare + 0.9 * streak),
    )
    return colour(rgb, shape)


FLASH = Scene(
    name="flash",
    title="black, and a lamp of 5000 for a moment",
    parameter=(0.0, 1.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
