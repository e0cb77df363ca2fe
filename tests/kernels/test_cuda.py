"""The CUDA backend on a GPU: on torch's streams, in graphs, in pieces, and by the short way.

That it draws right is what test_parity_*.py and test_robustness.py say of every backend.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import doublure_kernels as dk
import numpy as np
import pytest
import torch
from doublure_kernels.errors import DeviceError, DtypeError
from doublure_kernels.gpu import plan
from doublure_kernels.scene import Raster, Scene

from . import scenes
from .on_devices import check_fit, in_threads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

RASTER = Raster(70, 50)


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    from doublure_kernels.gpu.cuda.backend import CudaBackend

    opened = CudaBackend()
    yield opened
    opened.close()


def on_device(scene: Scene) -> Scene:
    arrays = (scene.params, scene.sigma, scene.background, scene.counts)
    return Scene(*(torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in arrays))


def targets(batch: int, raster: Raster) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (batch, raster.height, raster.width, 3)
    return torch.rand(shape, device="cuda", generator=generator)


def same(a: Any, b: Any) -> bool:
    losses = torch.equal(a[0], b[0])
    names = ("params", "sigma", "background")
    return losses and all(torch.equal(getattr(a[1], n), getattr(b[1], n)) for n in names)


def test_a_batch_drawn_in_pieces_is_the_same(backend: Any, monkeypatch: Any) -> None:
    scene, given = on_device(scenes.make("small", batch=3)), targets(3, RASTER)
    whole = backend.fused_mse(scene, RASTER, given)
    image = backend.forward(scene, RASTER)
    for scratch, largest in ((0, 1 << 30), (0, 20_000), (1 << 30, 30_000)):
        monkeypatch.setattr(plan, "whole", lambda *_: None)
        monkeypatch.setattr(type(backend), "_budget", lambda *_, n=scratch: n)
        monkeypatch.setattr("doublure_kernels.gpu.cuda.backend._LARGEST", largest)
        backend._plans.clear()
        losses, grads = backend.fused_mse(scene, RASTER, given)
        torch.testing.assert_close(losses, whole[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(grads.params, whole[1].params, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(grads.sigma, whole[1].sigma, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads.background, whole[1].background, rtol=1e-5, atol=1e-7)
        assert torch.equal(backend.forward(scene, RASTER), image)


def test_the_same_bits_on_any_stream_and_in_any_thread(backend: Any) -> None:
    scene, given = on_device(scenes.make("small", batch=2, triangles=40)), targets(2, RASTER)
    expected = backend.fused_mse(scene, RASTER, given)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [backend.fused_mse(scene, RASTER, given) for _ in range(50)]
        stream.synchronize()
        wrong.extend(i for i, one in enumerate(found) if not same(one, expected))

    in_threads(work)
    assert not wrong


def test_work_waits_for_what_was_asked_before_on_its_stream(backend: Any) -> None:
    """Parameters that a long kernel before it writes are those that it draws."""
    scene = on_device(scenes.make("small", batch=1))
    late = Scene(torch.zeros_like(scene.params), scene.sigma, scene.background, scene.counts)
    stream = torch.cuda.Stream()
    expected = backend.forward(scene, RASTER)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.params.copy_(scene.params)
        image = backend.forward(late, RASTER)
        late.params.zero_()
    stream.synchronize()
    assert torch.equal(image, expected)


def test_a_graph_draws_what_its_parameters_are_by_then() -> None:
    params = dk.random_params(2, 30, device="cuda").contiguous()
    given = targets(2, RASTER)
    dk.fused_loss(params, given, 0.01)  # kernels are loaded before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses, grads = dk.fused_loss(params, given, 0.01)
    for seed in range(3):
        torch.manual_seed(seed)
        params.copy_(dk.random_params(2, 30, device="cuda"))
        graph.replay()
        expected = dk.fused_loss(params, given, 0.01)
        assert torch.equal(losses, expected[0])
        assert torch.equal(grads, expected[1])


def test_the_short_way_says_what_the_long_way_says() -> None:
    params = dk.random_params(3, 20, device="cuda")
    given = targets(3, RASTER)
    short = dk.fused_loss(params, given, 0.01, (0.1, 0.2, 0.3))
    assert dk.last_device() == "cuda"
    counts = torch.full((3,), 20, device="cuda")
    long = dk.fused_loss(params, given, 0.01, (0.1, 0.2, 0.3), counts=counts)
    torch.testing.assert_close(short[0], long[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(short[1], long[1], rtol=1e-4, atol=1e-7)
    cpu = dk.fused_loss(params.cpu(), given.cpu(), 0.01, (0.1, 0.2, 0.3), device="cpu")
    torch.testing.assert_close(short[0].cpu(), cpu[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(short[1].cpu(), cpu[1], rtol=1e-3, atol=1e-6)


def test_autograd_on_the_device() -> None:
    params = dk.random_params(2, 20, device="cuda").requires_grad_()
    given = targets(2, RASTER).permute(0, 3, 1, 2).contiguous()
    dk.fused_mse(params, given, 0.01).backward()
    fused = params.grad
    params.grad = None
    image = dk.rasterize(params, RASTER.height, RASTER.width, 0.01)
    assert image.is_cuda
    assert dk.last_device() == "cuda"
    torch.nn.functional.mse_loss(image, given).backward()
    torch.testing.assert_close(params.grad, fused, rtol=1e-4, atol=1e-8)


def test_memory_stays_what_it_was() -> None:
    params, given = dk.random_params(2, 50, device="cuda"), targets(2, RASTER)
    for _ in range(10):
        dk.fused_loss(params, given, 0.01)
    before = torch.cuda.memory_allocated()
    for _ in range(5_000):
        dk.fused_loss(params, given, 0.01)
    assert torch.cuda.memory_allocated() == before


def test_sigma_and_counts_that_cannot_be_do_no_harm() -> None:
    params = dk.random_params(1, 4, device="cuda")
    sigma = torch.tensor([[0.01, float("nan"), -1.0, 0.0]], device="cuda")
    image = dk.rasterize(params, 20, 20, sigma, counts=torch.tensor([9], device="cuda"))
    alone = dk.rasterize(params[:, :1], 20, 20, 0.01)
    assert torch.equal(image, alone)
    with pytest.raises(dk.errors.SettingError, match="sigma must be positive"):
        dk.rasterize(params, 20, 20, sigma, check=True)


def test_doubles_are_refused_by_name() -> None:
    params = dk.random_params(1, 4, device="cuda").double()
    with pytest.raises(DtypeError, match="float32"):
        dk.rasterize(params, 20, 20, 0.01, device="cuda")
    assert dk.rasterize(params, 20, 20, 0.01).dtype == torch.float64
    assert dk.last_device() == "cpu"


def test_closed_is_closed() -> None:
    from doublure_kernels.gpu.cuda.backend import CudaBackend

    opened = CudaBackend()
    opened.close()
    opened.close()
    with pytest.raises(DeviceError, match="closed"):
        opened.forward(on_device(scenes.make("small", batch=1)), RASTER)


def test_a_process_ends_cleanly_without_closing() -> None:
    code = (
        "import torch, doublure_kernels as dk\n"
        "p = dk.random_params(1, 4, device='cuda')\n"
        "dk.fused_loss(p, torch.zeros(1, 8, 8, 3, device='cuda'), 0.01)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr


@pytest.mark.parametrize("coarse", [0.0, 1.0])
def test_a_fit_on_the_device_is_as_good_as_on_the_host(coarse: float) -> None:
    check_fit("cuda", coarse)
