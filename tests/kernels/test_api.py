"""The public functions: what they accept, return and refuse."""

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import doublure_kernels as dk
import pytest
import torch
from doublure_kernels import api
from torch import Tensor

HOSTS = ("cpu", "reference")


@pytest.fixture(autouse=True)
def sharp_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning about sigma but where a test asks for it."""
    monkeypatch.setattr(api, "_warned", True)


def triangles(batch: int = 2, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return dk.random_params(batch, count, generator=torch.Generator().manual_seed(5)).to(dtype)


def pictures(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(6)).to(dtype)


def draw(params: Tensor, **settings: Any) -> Tensor:
    return dk.rasterize(params, 7, 9, **{"sigma": 0.05, "device": "cpu"} | settings)


# Sigma, background and counts in all their forms.


@pytest.mark.parametrize("device", HOSTS)
def test_every_form_of_sigma_is_the_full_one(device: str) -> None:
    params = triangles()
    full = draw(params, sigma=torch.full((2, 4), 0.05), device=device)
    for sigma in (
        0.05,
        torch.tensor(0.05),
        torch.full((4,), 0.05),
        torch.full((2, 1), 0.05),
        [0.05] * 4,
        torch.full((2, 8), 0.05)[:, ::2],
    ):
        assert torch.equal(draw(params, sigma=sigma, device=device), full)


def test_sigma_belongs_to_its_triangle() -> None:
    params = triangles()
    sigma = torch.tensor([[0.01, 0.02, 0.03, 0.04], [0.08, 0.07, 0.06, 0.05]])
    both = draw(params, sigma=sigma)
    for item in range(2):
        alone = draw(params[item : item + 1], sigma=sigma[item])
        assert torch.equal(both[item : item + 1], alone)
    assert not torch.equal(both, draw(params, sigma=sigma.flip(1)))


@pytest.mark.parametrize("shape", [(), (4,), (2, 1), (2, 4)])
def test_sigma_gets_a_gradient_in_its_own_shape(shape: tuple[int, ...]) -> None:
    params = triangles(dtype=torch.float64)
    full = torch.full((2, 4), 0.05, dtype=torch.float64, requires_grad=True)
    sigma = torch.full(shape, 0.05, dtype=torch.float64, requires_grad=True)
    for one in (full, sigma):
        draw(params, sigma=one).square().sum().backward()
    assert full.grad is not None
    torch.testing.assert_close(sigma.grad, full.grad.sum_to_size(shape))


@pytest.mark.parametrize(
    "background", [[0.1, 0.2, 0.3], (0.1, 0.2, 0.3), torch.tensor([0.1, 0.2, 0.3])]
)
def test_every_form_of_background_is_the_full_one(background: Any) -> None:
    params = triangles()
    full = torch.tensor([[0.1, 0.2, 0.3]]).repeat(2, 1)
    assert torch.equal(draw(params, background=background), draw(params, background=full))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_background_gets_what_shows_through(shape: tuple[int, ...]) -> None:
    params = triangles(dtype=torch.float64)
    background = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    images = draw(params, background=background, alpha=True)
    images[:, :3].sum().backward()
    through = (1 - images[:, 3:]).expand(2, 3, 7, 9).sum((2, 3)).detach()
    torch.testing.assert_close(background.grad, through.sum_to_size(shape))


@pytest.mark.parametrize(
    "counts", [[1, 3], torch.tensor([1, 3]), torch.tensor([1, 3]).to(torch.uint8)]
)
@pytest.mark.parametrize("device", HOSTS)
def test_counts_cut_each_item_short(device: str, counts: Any) -> None:
    params = triangles().requires_grad_()
    images = draw(params, counts=counts, device=device)
    for item, count in enumerate((1, 3)):
        alone = draw(params[item : item + 1, :count], device=device)
        assert torch.equal(images[item : item + 1], alone)
    images.sum().backward()
    assert params.grad is not None
    assert params.grad[1, :3].abs().sum() > 0
    assert not params.grad[0, 1:].any()
    assert not params.grad[1, 3:].any()


# Images: layout, alpha, kernels, supports.


@pytest.mark.parametrize("device", HOSTS)
def test_alpha_is_a_fourth_channel_beside_the_same_three(device: str) -> None:
    params = triangles()
    rgba = draw(params, alpha=True, device=device)
    assert rgba.shape == (2, 4, 7, 9)
    assert torch.equal(rgba[:, :3], draw(params, device=device))
    seen = draw(params, background=(1.0, 1.0, 1.0), device=device) - rgba[:, :3]
    torch.testing.assert_close(seen[:, 0], 1 - rgba[:, 3], atol=1e-6, rtol=0)


def test_kernel_and_support_reach_the_backend() -> None:
    params = triangles()
    images = [
        draw(params, kernel=kernel, support=support, sigma=0.02)
        for kernel in ("sigmoid", "compact")
        for support in ("exact", "bbox6")
    ]
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert torch.equal(images[2], images[3]), "compact ends well within six sigma"


def test_sizes_need_be_neither_even_nor_equal() -> None:
    params = triangles(1)
    for height, width in ((1, 1), (1, 37), (37, 1), (13, 2051)):
        assert dk.rasterize(params, height, width, 0.05).shape == (1, 3, height, width)


# Nothing to draw.


@pytest.mark.parametrize("device", HOSTS)
def test_no_triangles_give_the_background(device: str) -> None:
    params = torch.zeros(2, 0, 10, requires_grad=True)
    images = draw(params, background=(0.1, 0.2, 0.3), device=device)
    assert torch.equal(
        images, torch.tensor([0.1, 0.2, 0.3])[None, :, None, None].expand(2, 3, 7, 9)
    )
    images.sum().backward()
    assert params.grad is not None
    assert params.grad.shape == (2, 0, 10)
    loss = dk.fused_mse(params, torch.full((2, 3, 7, 9), 0.5), device=device)
    torch.testing.assert_close(loss, torch.tensor(0.25))
    losses, grads = dk.fused_loss(params, torch.full((2, 7, 9, 3), 0.5), device=device)
    torch.testing.assert_close(losses, torch.full((2,), 0.25))
    assert grads.shape == (2, 0, 10)


@pytest.mark.parametrize("device", HOSTS)
def test_no_items_give_nothing(device: str) -> None:
    params = torch.zeros(0, 4, 10, requires_grad=True)
    images = draw(params, device=device)
    assert images.shape == (0, 3, 7, 9)
    images.sum().backward()
    assert params.grad is not None
    assert params.grad.shape == (0, 4, 10)
    loss = dk.fused_mse(params, torch.zeros(0, 3, 7, 9), 0.05, device=device)
    assert loss == 0
    loss.backward()
    losses, grads = dk.fused_loss(params, torch.zeros(0, 7, 9, 3), 0.05, device=device)
    assert losses.shape == (0,)
    assert grads.shape == (0, 4, 10)


@pytest.mark.parametrize("device", HOSTS)
def test_meeting_vertices_and_pixel_centres_give_finite_gradients(device: str) -> None:
    centre = [4.5 / 9, 3.5 / 7]
    corners = [centre * 3, [*centre, 0.1, 0.1, 0.9, 0.9], [0.1, 0.1, 0.5, 0.5, 0.9, 0.9]]
    rows = [[*corner, 0.5, 0.5, 0.5, 0.5] for corner in corners]
    params = torch.tensor([rows], requires_grad=True)
    draw(params, device=device).square().sum().backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()


# Dtypes and strides.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", HOSTS)
def test_half_precision_is_computed_in_float32(device: str, dtype: torch.dtype) -> None:
    params = triangles(dtype=dtype).requires_grad_()
    exact = params.detach().float().requires_grad_()
    images, wanted = draw(params, device=device), draw(exact, device=device)
    assert images.dtype == dtype
    assert torch.equal(images, wanted.to(dtype))
    targets = pictures(2, 3, 7, 9, dtype=dtype)
    loss = dk.fused_mse(params, targets, 0.05, device=device)
    wanted = dk.fused_mse(exact, targets.float(), 0.05, device=device)
    assert loss.dtype == dtype
    assert loss == wanted.to(dtype)
    (loss.float() * 4).backward()
    (wanted * 4).backward()
    assert exact.grad is not None
    assert params.grad is not None
    assert params.grad.dtype == dtype
    assert torch.equal(params.grad, exact.grad.to(dtype))


def test_float64_is_honoured() -> None:
    params = triangles(dtype=torch.float64)
    cpu, reference = (draw(params, device=device) for device in HOSTS)
    assert cpu.dtype == torch.float64
    torch.testing.assert_close(cpu, reference, atol=1e-12, rtol=0)
    targets = pictures(2, 7, 9, 3, dtype=torch.float64)
    losses, grads = dk.fused_loss(params, targets, 0.05, device="cpu")
    assert losses.dtype == grads.dtype == torch.float64
    wanted = dk.fused_loss(params, targets, 0.05, device="reference")
    torch.testing.assert_close((losses, grads), wanted, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    "stride",
    [
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
        lambda t: t.flip(-1).contiguous().flip(-1),
        lambda t: torch.complex(t, -t).conj().imag,
    ],
    ids=["every second", "batch last", "flipped", "negated lazily"],
)
def test_strides_make_no_difference(stride: Callable[[Tensor], Tensor]) -> None:
    params, targets = triangles(), pictures(2, 3, 7, 9)
    odd = stride(params).detach().requires_grad_()
    even = params.clone().requires_grad_()
    assert torch.equal(draw(odd), draw(even))
    for one in (odd, even):
        (draw(one) * stride(targets)).sum().backward()
        dk.fused_mse(one, stride(targets), 0.05, device="cpu").backward()
    assert torch.equal(odd.grad, even.grad)  # type: ignore[arg-type]


def test_nothing_given_is_changed() -> None:
    params, targets = triangles().requires_grad_(), pictures(2, 3, 7, 9)
    before = params.detach().clone(), targets.clone()
    dk.fused_mse(params, targets, 0.05, device="cpu").backward()
    draw(params).sum().backward()
    assert torch.equal(params.detach(), before[0])
    assert torch.equal(targets, before[1])


# The loss.


@pytest.mark.parametrize("device", HOSTS)
def test_the_fused_loss_is_what_drawing_and_comparing_gives(device: str) -> None:
    leaves = [
        triangles(dtype=torch.float64),
        torch.full((4,), 0.05, dtype=torch.float64),
        torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    targets = pictures(2, 3, 7, 9, dtype=torch.float64)
    params, sigma, background = leaves
    fused = dk.fused_mse(params, targets, sigma, background, device, counts=[4, 2])
    images = dk.rasterize(params, 7, 9, sigma, background, device=device, counts=[4, 2])
    plain = torch.nn.functional.mse_loss(images, targets)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(
        torch.autograd.grad(fused, leaves), torch.autograd.grad(plain, leaves)
    )


def test_targets_that_want_a_gradient_get_it() -> None:
    params = triangles(dtype=torch.float64).requires_grad_()
    targets = pictures(2, 3, 7, 9, dtype=torch.float64).requires_grad_()
    loss = dk.fused_mse(params, targets, 0.05, device="cpu")
    images = draw(params)
    plain = torch.nn.functional.mse_loss(images, targets)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (params, targets)),
        torch.autograd.grad(plain, (params, targets)),
    )
    with torch.no_grad():
        torch.testing.assert_close(dk.fused_mse(params, targets, 0.05, device="cpu"), loss)


def test_the_call_without_graph_has_none() -> None:
    params = triangles().requires_grad_()
    losses, grads = dk.fused_loss(params, pictures(2, 7, 9, 3), 0.05, device="cpu")
    assert not losses.requires_grad
    assert not grads.requires_grad
    assert params.grad is None


# What is not finite.


def test_a_triangle_that_is_not_finite_is_not_there() -> None:
    params = triangles()
    params[1, 2, 4] = float("nan")
    params.requires_grad_()
    images = draw(params)
    rest = torch.cat([params[1:, :2], params[1:, 3:]], 1)
    torch.testing.assert_close(images[1:], draw(rest), atol=1e-6, rtol=0)
    images.sum().backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    assert not params.grad[1, 2].any()


def test_check_names_the_first_bad_triangle() -> None:
    params = triangles()
    params[1, 2, 4], params[1, 3, 0] = float("nan"), float("inf")
    with pytest.raises(dk.NonFiniteError) as caught:
        draw(params, check=True)
    assert str(caught.value) == (
        "params: expected finite numbers, got x2 = nan in triangle 2 of item 1; look for a "
        "diverging step before it, or pass check=False to leave such triangles out"
    )
    draw(params, check=True, counts=[4, 2])  # the bad ones are not among these


def test_check_looks_at_background_and_targets() -> None:
    params, targets = triangles(), pictures(2, 3, 7, 9)
    with pytest.raises(dk.NonFiniteError, match=r"background: expected finite numbers, got inf"):
        draw(params, background=(0.0, float("inf"), 0.0), check=True)
    targets[1, 2, 3, 4] = float("nan")
    with pytest.raises(dk.NonFiniteError, match=r"targets: .* got nan at \[1, 3, 4, 2\]"):
        dk.fused_mse(params, targets, 0.05, device="cpu", check=True)
    with pytest.raises(dk.NonFiniteError, match="targets"):
        dk.fused_loss(params, targets.movedim(1, -1), 0.05, device="cpu", check=True)


# What is refused.

GOOD = triangles()
PLANES = pictures(2, 3, 7, 9)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: draw(GOOD[0]), dk.ShapeError, "expected params of shape (B, T, 10), got (4, 10)"),
        (lambda: draw(GOOD[..., :9]), dk.ShapeError, "of shape (B, T, 10), got (2, 4, 9)"),
        (lambda: draw(GOOD.tolist()), dk.DtypeError, "params: expected a torch tensor, got list"),
        (lambda: draw(GOOD.int()), dk.DtypeError, "got torch.int32; convert them"),
        (lambda: draw(GOOD + 0j), dk.DtypeError, "got torch.complex64; convert them"),
        (
            lambda: dk.rasterize(GOOD, 0, 9),
            dk.SettingError,
            "height and width must be positive, got 0 and 9",
        ),
        (
            lambda: dk.rasterize(GOOD, 7, -1),
            dk.SettingError,
            "height and width must be positive, got 7 and -1",
        ),
        (
            lambda: dk.rasterize(GOOD, 7.5, 9),
            dk.SettingError,
            "height and width must be positive whole numbers, got 7.5",
        ),
        (lambda: draw(GOOD, sigma=0), dk.SettingError, "sigma must be positive"),
        (lambda: draw(GOOD, sigma=-1.0), dk.SettingError, "sigma must be positive"),
        (lambda: draw(GOOD, sigma=float("nan")), dk.SettingError, "sigma must be positive"),
        (
            lambda: draw(GOOD, sigma=float("inf")),
            dk.SettingError,
            "expected a finite number, got inf",
        ),
        (
            lambda: draw(GOOD, sigma=torch.tensor([0.1, 0.1, 0.0, 0.1])),
            dk.SettingError,
            "sigma must be positive: expected finite values over 0, got 0.0 for triangle 2 of "
            "item 0",
        ),
        (
            lambda: draw(GOOD, sigma=torch.ones(3)),
            dk.ShapeError,
            "sigma: expected a number or shape (4,), (2, 1) or (2, 4) for 2 items of 4 triangles, "
            "got (3,)",
        ),
        (lambda: draw(GOOD, sigma=torch.ones(1, 4)), dk.ShapeError, "got (1, 4)"),
        (
            lambda: draw(GOOD, sigma=torch.ones(4).double()),
            dk.DtypeError,
            "sigma: expected torch.float32, as params are, got torch.float64; convert one of them",
        ),
        (
            lambda: draw(GOOD, sigma=torch.ones(4, device="meta")),
            dk.DeviceError,
            "sigma: expected a tensor on cpu, where params are, got one on meta; move one of them",
        ),
        (
            lambda: draw(GOOD, background=(0.0, 0.0)),
            dk.ShapeError,
            "background: expected three numbers or shape (3,) or (2, 3), got (2,)",
        ),
        (
            lambda: draw(GOOD, background=torch.ones(3).half()),
            dk.DtypeError,
            "background: expected",
        ),
        (
            lambda: draw(GOOD, counts=[1, 2, 3]),
            dk.ShapeError,
            "counts: expected shape (2,), got (3,)",
        ),
        (lambda: draw(GOOD, counts=[1.0, 2.0]), dk.DtypeError, "counts: expected whole numbers"),
        (
            lambda: draw(GOOD, counts=[4, 5]),
            dk.SettingError,
            "counts: expected 0 to 4 triangles an item, got 5 for item 1",
        ),
        (lambda: draw(GOOD, counts=[-1, 2]), dk.SettingError, "got -1 for item 0"),
        (
            lambda: draw(GOOD, kernel="gauss"),
            dk.SettingError,
            'kernel: expected "sigmoid" or "compact", got \'gauss\'',
        ),
        (
            lambda: draw(GOOD, support="bbox"),
            dk.SettingError,
            'support: expected "exact" or "bbox6", got \'bbox\'',
        ),
        (lambda: draw(GOOD, device="cpuu"), dk.DeviceError, 'did you mean "cpu"?'),
        (lambda: draw(GOOD, device="gpu"), dk.DeviceError, 'device "gpu": expected a GPU backend'),
        (
            lambda: dk.fused_mse(GOOD, PLANES.movedim(1, -1)),
            dk.ShapeError,
            "expected targets of shape (B, 3, H, W), got (2, 7, 9, 3); images with the channels "
            "last need permute(0, 3, 1, 2)",
        ),
        (lambda: dk.fused_mse(GOOD, PLANES[0]), dk.ShapeError, "shape (B, 3, H, W), got (3, 7, 9)"),
        (
            lambda: dk.fused_mse(GOOD, PLANES[:1], 0.05),
            dk.ShapeError,
            "targets: expected a batch of 2, as params are, got 1",
        ),
        (
            lambda: dk.fused_mse(GOOD, PLANES[..., :0], 0.05),
            dk.ShapeError,
            "targets: height and width must be positive, got 7 and 0",
        ),
        (
            lambda: dk.fused_mse(GOOD, PLANES.double(), 0.05),
            dk.DtypeError,
            "targets: expected torch.float32, as params are, got torch.float64",
        ),
        (
            lambda: dk.fused_mse(GOOD, PLANES.numpy(), 0.05),
            dk.DtypeError,
            "targets: expected a torch tensor, got ndarray",
        ),
        (lambda: dk.fused_mse(GOOD, PLANES, -1), dk.SettingError, "sigma must be positive"),
        (
            lambda: dk.fused_mse(GOOD[0], PLANES),
            dk.ShapeError,
            "expected params of shape (B, T, 10)",
        ),
        (
            lambda: dk.fused_loss(GOOD, PLANES, 0.05),
            dk.ShapeError,
            "expected targets of shape (B, H, W, 3), got (2, 3, 7, 9); images with the channels "
            "first need permute(0, 2, 3, 1)",
        ),
        (lambda: dk.fused_loss(GOOD, PLANES.movedim(1, -1), 0), dk.SettingError, "sigma must be"),
        (lambda: dk.random_params(-1, 2), dk.SettingError, "0 or more, got -1 and 2"),
        (lambda: dk.clamp_params(GOOD[..., :9]), dk.ShapeError, "shape (..., 10), got (2, 4, 9)"),
        (
            lambda: dk.psnr(PLANES, PLANES[:1]),
            dk.ShapeError,
            "psnr: expected two images of one shape, got (2, 3, 7, 9) and (1, 3, 7, 9)",
        ),
        (lambda: dk.anneal_sigma(0, 0), dk.SettingError, "expected steps of 1 or more, got 0"),
        (lambda: dk.anneal_sigma(0, 5, end=0.0), dk.SettingError, "start and end over 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


# Sharp edges, annealing, and the rest.


def test_a_sharp_edge_warns_once_where_gradients_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "_warned", False)
    params = triangles()
    dk.rasterize(params, 64, 128, device="cpu")  # no gradient is wanted
    params.requires_grad_()
    with torch.no_grad():
        dk.rasterize(params, 64, 128, device="cpu")
    dk.rasterize(params, 64, 128, 0.25 / 128, device="cpu")  # not under a quarter
    with pytest.warns(dk.SigmaWarning) as caught:
        dk.rasterize(params, 64, 128, device="cpu")
    assert str(caught[0].message) == (
        "sigma is 0.0015, under a quarter of a pixel (0.00195 at 64 x 128): most triangles get no "
        "gradient there; start softer and lower it with anneal_sigma"
    )
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dk.rasterize(params, 64, 128, device="cpu")
        dk.fused_mse(params, torch.zeros(2, 3, 64, 128), device="cpu")


def test_the_loss_warns_too_and_sigma_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    params, targets = triangles(), torch.zeros(2, 3, 16, 16)
    sigma = torch.tensor([0.1, 0.1, 0.001, 0.1], requires_grad=True)
    monkeypatch.setattr(api, "_warned", False)
    with pytest.warns(
        dk.SigmaWarning, match=r"sigma is 0.001, under a quarter of a pixel \(0.0156"
    ):
        dk.fused_mse(params, targets, sigma, device="cpu")
    monkeypatch.setattr(api, "_warned", False)
    torch.vmap(lambda s: dk.rasterize(params, 16, 16, s, device="cpu"))(sigma)  # has no one number


def test_annealing_falls_geometrically_from_start_to_end() -> None:
    sigmas = [dk.anneal_sigma(step, 101) for step in range(101)]
    assert sigmas[0] == 0.02
    assert sigmas[-1] == 0.0015
    ratios = [b / a for a, b in itertools.pairwise(sigmas)]
    assert max(ratios) - min(ratios) < 1e-12
    assert max(ratios) < 1
    assert dk.anneal_sigma(-3, 101) == 0.02
    assert dk.anneal_sigma(500, 101) == 0.0015
    assert dk.anneal_sigma(0, 1) == 0.0015
    assert dk.anneal_sigma(1, 3, start=0.4, end=0.1) == pytest.approx(0.2)


def test_equal_images_have_no_nan_gradient() -> None:
    image = pictures(1, 3, 4, 4).requires_grad_()
    value = dk.psnr(image, image.detach().clone())
    assert value == float("inf")
    value.backward()
    assert image.grad is not None
    assert not image.grad.any()


def test_whatever_device_is_asked_for_is_what_ran() -> None:
    for name, ran in (("reference", "reference"), ("cpu", "cpu"), ("auto", "cpu")):
        params = triangles().requires_grad_()
        images = draw(params, device=name)
        assert dk.last_device() == ran
        draw(triangles(), device="reference" if ran == "cpu" else "cpu")
        images.sum().backward()
        assert dk.last_device() == ran, "the way back runs where the way there did"


def test_after_shutdown_the_next_call_opens_anew() -> None:
    wanted = draw(triangles())
    assert dk.shutdown()
    assert torch.equal(draw(triangles()), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_tensors_on_cuda_come_back_there() -> None:
    params = triangles().cuda().requires_grad_()
    images = draw(params)
    assert images.is_cuda
    torch.testing.assert_close(images.cpu(), draw(params.cpu()))
    images.sum().backward()
    assert params.grad is not None
    assert params.grad.is_cuda


def test_public_functions_tell_shapes_and_errors() -> None:
    for function in (dk.rasterize, dk.fused_mse, dk.fused_loss):
        text = inspect.getdoc(function) or ""
        assert "[B, T, 10]" in text
        for error in ("ShapeError", "DtypeError", "SettingError", "DeviceError", "NonFiniteError"):
            assert error in text


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p: dk.rasterize(p, 4, 4, 1e39), dk.SettingError, "sigma must be positive"),
        (lambda p: dk.rasterize(p, 4, 4, 1e-320), dk.SettingError, "got 1e-320"),
        (lambda p: dk.rasterize(p, 4, 4, ".1"), dk.SettingError, "sigma: expected numbers"),
        (lambda p: dk.rasterize(p, 4, 4, 0.1, "red"), dk.SettingError, "background: expected"),
        (lambda p: dk.rasterize(p, 2**63, 4, 0.1), dk.SettingError, "expected at most 1,048,576"),
        (lambda p: dk.rasterize(p.to_sparse(), 4, 4), dk.DtypeError, "expected a dense tensor"),
    ],
)
def test_what_torch_would_refuse_obscurely(
    call: Callable[[torch.Tensor], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(dk.random_params(1, 2))


def test_plain_calls_on_the_processor_go_a_shorter_way_to_the_same_bits() -> None:
    params, targets = dk.random_params(2, 20).requires_grad_(), torch.rand(2, 24, 17, 3)
    counts = [20, 20]  # for all of them, which takes the long way
    for kernel, support in (("sigmoid", "exact"), ("compact", "bbox6")):
        settings = {"kernel": kernel, "support": support, "device": "cpu"}
        short = dk.fused_loss(params, targets, 0.02, (0.1, 0.2, 0.3), **settings)
        long = dk.fused_loss(params, targets, 0.02, (0.1, 0.2, 0.3), counts=counts, **settings)
        assert torch.equal(short[0], long[0])
        assert torch.equal(short[1], long[1])
        assert not short[1].requires_grad
    assert dk.last_device() == "cpu"
