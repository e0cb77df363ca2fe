"""The fitter: its recipe, its stops, what it keeps, and going on to the same bits."""

import subprocess
import sys

import numpy as np
import pytest
from doublure_kernels.cpu import CpuBackend
from doublure_kernels.errors import (
    DeviceError,
    ImageError,
    ResumeError,
    SettingError,
    ShapeError,
    SigmaWarning,
)
from doublure_kernels.fit import Fit, FitSettings, FitState, HostOptimiser, Problem, psnr_db
from doublure_kernels.fit.loops import adam_project
from doublure_kernels.fit.optimiser import HIGH, LOW
from doublure_kernels.fit.start import first_triangles
from doublure_kernels.scene import Gradients


def picture(height: int = 20, width: int = 28) -> np.ndarray:
    """A bright disc on a ramp."""
    y, x = np.mgrid[0:height, 0:width]
    inside = (x / width - 0.4) ** 2 + (y / height - 0.5) ** 2 < 0.07
    ramp = np.stack([x / width, 0.3 + 0 * x, y / height], axis=2) * 0.5
    return np.where(inside[..., None], [0.9, 0.8, 0.1], ramp).astype(np.float32)


SMALL = FitSettings(triangles=8, iterations=40, seed=3)


class Scripted:
    """A backend whose losses are told beforehand, and whose gradients are those given."""

    name = "scripted"
    adapter = None

    def __init__(self, losses: list[float], gradient: float = 1.0) -> None:
        self.losses = losses
        self.gradient = gradient
        self.seen: list[np.ndarray] = []
        self.sigmas: list[float] = []
        self.closed = 0

    def forward(self, scene, raster):
        return np.zeros((len(scene.params), raster.height, raster.width, 3), np.float32)

    def backward(self, scene, raster, grad_images):
        raise NotImplementedError

    def fused_mse(self, scene, raster, targets):
        assert targets.shape == (1, raster.height, raster.width, 3)
        self.seen.append(scene.params[0].copy())
        self.sigmas.append(float(scene.sigma[0, 0]))
        loss = self.losses[len(self.seen) - 1]
        grads = np.full(scene.params.shape, self.gradient, np.float32)
        return np.array([loss], np.float32), Gradients(grads, None, None)

    def close(self) -> None:
        self.closed += 1


def test_adam_and_the_projection_agree_with_the_paper_in_float64() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(-0.3, 1.3, (5, 10)).astype(np.float32)
    first, second = np.zeros_like(values), np.zeros_like(values)
    rates = np.array([0.004] * 6 + [0.02] * 3 + [0.01], np.float32)
    x, m, v = values.astype(np.float64), np.zeros((5, 10)), np.zeros((5, 10))
    for count in range(1, 30):
        g = rng.normal(0, 10.0 ** rng.integers(-6, 0), (5, 10)).astype(np.float32)
        assert adam_project(values, g, first, second, rates, LOW, HIGH, 0.9, 0.999, 1e-8, count)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g.astype(np.float64) ** 2
        x -= rates * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        x = np.clip(x, [-0.25] * 6 + [0] * 3 + [1e-3], [1.25] * 6 + [1] * 3 + [0.999])
    np.testing.assert_allclose(values, x, atol=2e-6)
    before = values.copy(), first.copy(), second.copy()
    g[4, 9] = np.nan
    assert not adam_project(values, g, first, second, rates, LOW, HIGH, 0.9, 0.999, 1e-8, 30)
    for array, old in zip((values, first, second), before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("start", ["detail", "random"])
def test_first_triangles(start: str) -> None:
    target = picture()
    settings = FitSettings(triangles=200, start=start, seed=5)
    found = first_triangles(target, settings)
    np.testing.assert_array_equal(found, first_triangles(target, settings))
    assert found.shape == (200, 10)
    assert found.dtype == np.float32
    assert ((found[:, 9] >= 0.3) & (found[:, 9] <= 0.7)).all()
    centre = found[:, :6].reshape(-1, 3, 2).mean(axis=1)
    inside = ((centre > 0.01) & (centre < 0.99)).all(axis=1)
    assert inside.sum() > 100
    at = (centre[inside] * [28, 20]).astype(int)
    np.testing.assert_array_equal(found[inside, 6:9], target[at[:, 1], at[:, 0]])
    assert not np.array_equal(
        found, first_triangles(target, FitSettings(triangles=200, start=start, seed=6))
    )


def test_detail_draws_the_small_triangles() -> None:
    """All there is to see lies in the left upper corner; in front, most triangles do."""
    target = np.zeros((64, 64, 3), np.float32)
    target[4:12:2, 4:12] = 1
    found = first_triangles(target, FitSettings(triangles=400))[200:]
    centre = found[:, :6].reshape(-1, 3, 2).mean(axis=1)
    assert (centre < 0.35).all(axis=1).mean() > 0.6


def test_a_fit_gets_better_and_its_scene_scores_what_it_says() -> None:
    target = picture()
    blank = float(np.mean((target - target.mean(axis=(0, 1))) ** 2))
    settings = FitSettings(triangles=12, iterations=150)
    with Fit(target, settings) as fit:
        losses = fit.step(1000)
        assert fit.stopped == "completed"
        assert len(losses) == fit.iteration == 150
        assert fit.best_loss == losses[fit.state.best_iteration]
        assert fit.best_loss < 0.2 * blank
        assert fit.score() == pytest.approx(fit.best_loss, rel=1e-4)
        assert fit.scene.sigma == fit.sigma_at(fit.state.best_iteration)
        assert len(fit.step(5)) == 0
        assert fit.render(7, 300).shape == (7, 300, 3)
        # At twice the size it is the same picture: its averages are those of the small one.
        large = fit.render(80, 112).reshape(20, 4, 28, 4, 3).mean(axis=(1, 3))
        assert np.abs(large - fit.render()).mean() < 0.01


def test_parameters_stay_in_their_ranges() -> None:
    settings = FitSettings(
        triangles=20, iterations=60, position_rate=0.5, colour_rate=0.9, alpha_rate=0.9,
        divergence=1000.0,
    )  # fmt: skip
    with Fit(picture(), settings) as fit:
        for _ in range(12):
            fit.step(5)
            values = fit.current.triangles
            assert (values >= LOW).all()
            assert (values <= HIGH).all()


def test_sigma_falls_geometrically_and_the_picture_grows_with_it() -> None:
    backend = Scripted([0.1] * 100)
    settings = FitSettings(triangles=2, iterations=100, sigma_end=0.0025, coarse=0.9)
    with Fit(np.zeros((200, 400, 3)), settings, device=backend) as fit:
        assert fit.size_at(0) == (50, 100)
        assert fit.size_at(99) == (200, 400)
        fit.step(100)
    expected = 0.02 * (0.0025 / 0.02) ** (np.arange(100) / 99)
    np.testing.assert_allclose(backend.sigmas, expected, rtol=1e-6)
    sizes = [fit.size_at(i)[0] for i in range(100)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {50, 100, 200}
    assert backend.closed == 0  # a borrowed backend stays open


def test_the_best_is_kept_and_not_the_last() -> None:
    backend = Scripted([0.5, 0.4, 0.2, 0.3, 0.25])
    with Fit(picture(), FitSettings(triangles=3, iterations=5, coarse=0), device=backend) as fit:
        fit.step(5)
        assert fit.best_loss == pytest.approx(0.2)
        np.testing.assert_array_equal(fit.scene.triangles, backend.seen[2])
        assert not np.array_equal(fit.scene.triangles, fit.current.triangles)
        assert fit.scene.sigma == pytest.approx(backend.sigmas[2])


def test_what_was_best_on_a_reduced_picture_gives_way_at_the_next_size() -> None:
    settings = FitSettings(triangles=3, iterations=4, sigma_end=0.0025, coarse=0.9)
    backend = Scripted([0.1, 0.2, 0.4, 0.3])
    with Fit(np.zeros((100, 100, 3)), settings, device=backend) as fit:
        assert [fit.size_at(i)[0] for i in range(4)] == [50, 100, 100, 100]
        fit.step(4)
        assert fit.state.best_iteration == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.9])
def test_a_loss_that_runs_away_stops_it_and_the_best_is_kept(bad: float) -> None:
    backend = Scripted([0.2, 0.1, bad, 0.05])
    settings = FitSettings(triangles=3, iterations=4, coarse=0)
    with Fit(picture(), settings, device=backend) as fit:
        losses = fit.step(10)
        assert fit.stopped == "diverged"
        np.testing.assert_array_equal(losses, np.array([0.2, 0.1, bad], np.float32))
        assert fit.best_loss == pytest.approx(0.1)
        np.testing.assert_array_equal(fit.scene.triangles, backend.seen[1])


def test_gradients_that_are_no_numbers_stop_it_before_they_do_harm() -> None:
    backend = Scripted([0.2, 0.1], gradient=float("nan"))
    with Fit(picture(), FitSettings(triangles=3, iterations=4), device=backend) as fit:
        fit.step(10)
        assert fit.stopped == "diverged"
        assert np.isfinite(fit.state.triangles).all()
        assert fit.iteration == 1


@pytest.mark.parametrize(("patience", "stop", "made"), [(3, "converged", 6), (0, "completed", 9)])
def test_patience(patience: int, stop: str, made: int) -> None:
    backend = Scripted([0.5, 0.4, 0.3, 0.3, 0.3, 0.31, 0.3, 0.3, 0.3])
    settings = FitSettings(triangles=3, iterations=9, patience=patience, coarse=0)
    with Fit(picture(), settings, device=backend) as fit:
        assert len(fit.step(100)) == made
        assert fit.stopped == stop
        assert fit.state.best_iteration == 2


def test_flat_pictures_and_single_pixels_are_fitted_without_divergence() -> None:
    for shape in ((9, 9, 3), (1, 1, 3), (1, 50, 3)):
        with Fit(np.full(shape, 0.25), FitSettings(triangles=4, iterations=60)) as fit:
            fit.step(60)
            assert fit.stopped in ("completed", "converged")
            assert fit.score() < 1e-4


def test_interrupted_anywhere_it_goes_on_to_the_same_bits() -> None:
    settings = FitSettings(triangles=10, iterations=60, coarse=0.15, seed=1)
    with Fit(picture(), settings) as fit:
        assert fit.size_at(0) != fit.size_at(59)
        whole = fit.step(60)
        expected = fit.state
    for cut in (1, 17, 42, 59):
        with Fit(picture(), settings) as fit:
            begun = fit.step(cut)
            state = fit.state
            fit.step(3)  # what comes after must not reach into the copy
        with Fit(picture(), settings, state=state, threads=1) as fit:
            rest = fit.step(100)
            found = fit.state
        np.testing.assert_array_equal(np.concatenate([begun, rest]), whole)
        for name in ("triangles", "first", "second", "best"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.best_iteration == expected.best_iteration
        assert found.stopped == expected.stopped == "completed"


def test_steps_of_any_length_are_the_same_fit() -> None:
    with Fit(picture(), SMALL) as one, Fit(picture(), SMALL, threads=1) as other:
        losses = [other.step(count) for count in (1, 0, 7, 2, 30)]
        np.testing.assert_array_equal(one.step(40), np.concatenate(losses))


def test_a_state_of_other_settings_is_refused() -> None:
    with Fit(picture(), SMALL) as fit:
        fit.step(5)
        state = fit.state
    with pytest.raises(ResumeError, match=r"triangles: expected \[9, 10\] float32, got \[8, 10\]"):
        Fit(picture(), FitSettings(triangles=9), state=state)
    with pytest.raises(ResumeError, match="losses: expected at most 3, got 5"):
        Fit(picture(), FitSettings(triangles=8, iterations=3), state=state)
    state.first[0, 0] = np.nan
    with pytest.raises(ResumeError, match="first: expected finite numbers"):
        Fit(picture(), SMALL, state=state)


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        (np.zeros((4, 4)), ShapeError, r"expected linear RGB, [H, W, 3], got [4, 4]"),
        (np.zeros((4, 4, 4)), ShapeError, "got [4, 4, 4]"),
        (np.zeros((0, 4, 3)), ImageError, "expected pixels, got [0, 4, 3]"),
        (np.zeros((4, 4, 3), np.uint8), ImageError, "got uint8; divide bytes by 255"),
        (np.full((4, 4, 3), np.inf), ImageError, "got NaN or infinity"),
    ],
)
def test_wrong_targets_are_refused(target: np.ndarray, error: type, said: str) -> None:
    with pytest.raises(error) as caught:
        Fit(target)
    assert said in str(caught.value)


def test_devices_and_threads() -> None:
    with pytest.raises(DeviceError, match='did you mean "cpu"'):
        Fit(picture(), SMALL, device="cpuu")
    with pytest.raises(DeviceError, match="expected a backend that takes NumPy arrays"):
        Fit(picture(), SMALL, device="reference")
    with pytest.raises(SettingError, match="threads: expected 1 or more, got 0"):
        Fit(picture(), SMALL, threads=0)
    with pytest.raises(SettingError, match=r'threads: expected none with device "vulkan", got 2'):
        Fit(picture(), SMALL, device="vulkan", threads=2)
    with Fit(picture(), SMALL, device="cpu") as fit:
        assert fit.device == "cpu"
    with pytest.raises(SettingError, match="expected a count of 0 or more, got -1"):
        fit.step(-1)


def test_one_that_it_opened_is_closed_and_one_that_it_was_lent_is_not() -> None:
    fit = Fit(picture(), SMALL, threads=1)
    fit.close()
    fit.close()
    with pytest.raises(DeviceError, match="closed"):
        fit.step()
    with CpuBackend(1) as backend:
        Fit(picture(), SMALL, device=backend).close()
        assert len(Fit(picture(), SMALL, device=backend).step(2)) == 2


def test_a_sigma_below_a_quarter_of_a_pixel_is_warned_of_if_it_was_asked_for() -> None:
    with pytest.warns(
        SigmaWarning, match=r"expected at least a quarter of a pixel, 0.008929 at 28"
    ):
        Fit(picture(), FitSettings(sigma_end=0.001)).close()
    Fit(picture(), FitSettings()).close()  # warnings are errors here


def test_the_target_is_copied_and_never_changed() -> None:
    target = picture()
    with Fit(target, SMALL) as fit:
        target[:] = np.nan
        assert np.isfinite(fit.step(3)).all()


def test_an_optimiser_of_ones_own_makes_the_iterations() -> None:
    calls: list[int] = []

    class Counting(HostOptimiser):
        def __init__(self, backend: object, problem: Problem, state: FitState) -> None:
            super().__init__(backend, problem, state)  # type: ignore[arg-type]

        def run(self, count: int) -> None:
            calls.append(count)
            super().run(count)

    with Fit(picture(), SMALL, optimiser=Counting) as fit:
        assert len(fit.step(7)) == 7
    assert calls == [7]


def test_the_background_is_the_mean_or_the_colour() -> None:
    target = picture()
    with Fit(target, SMALL) as fit:
        np.testing.assert_allclose(fit.scene.background, target.mean(axis=(0, 1)), rtol=1e-5)
    with Fit(target, FitSettings(triangles=2, background="#ff8000")) as fit:
        np.testing.assert_allclose(fit.scene.background, [1.0, 0.2158605, 0.0], atol=1e-6)


def test_psnr() -> None:
    assert psnr_db(0.01) == pytest.approx(20.0)
    assert psnr_db(0.0) == float("inf")
    assert np.isnan(psnr_db(float("nan")))


def test_it_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from doublure_kernels.fit import Fit, FitSettings\n"
        "with Fit(np.zeros((4, 4, 3)), FitSettings(triangles=2, iterations=3)) as fit:\n"
        "    print(len(fit.step(3)), fit.stopped)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "3 completed\n"
