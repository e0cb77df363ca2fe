"""CUDA tensors through Vulkan: shared memory, one timeline, torch's current stream."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import doublure_kernels as dk
import pytest
import torch
from doublure_kernels import devices
from doublure_kernels.errors import DeviceError

from .conftest import vulkan_is_there
from .on_devices import in_threads

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not vulkan_is_there(), reason="no Vulkan device can run the kernels"),
]


@pytest.fixture(autouse=True)
def sharing() -> Iterator[None]:
    backend: Any = devices.default("vulkan")
    if not backend.shares(torch.cuda.current_device()):
        pytest.skip(f"{backend.adapter} does not share memory with CUDA")
    yield
    torch.cuda.synchronize()


def scene(batch: int = 2, triangles: int = 40, size: int = 70) -> tuple[Any, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    params = dk.random_params(batch, triangles, device="cuda", generator=generator)
    return params, torch.rand(batch, size, size, 3, device="cuda", generator=generator)


def fused(params: Any, targets: Any, device: str = "vulkan") -> Any:
    return dk.fused_loss(params, targets, 0.01, (0.1, 0.2, 0.3), device=device)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [(1, 5, 16), (2, 40, 70), (5, 300, 130), (1, 1, 1), (2, 0, 8)])
def test_it_draws_what_cuda_draws(shape: tuple[int, int, int]) -> None:
    params, targets = scene(*shape)
    found, expected = fused(params, targets), fused(params, targets, "cuda")
    assert dk.last_device() == "cuda"
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-6)
    size = shape[2]
    image = dk.rasterize(params, size, size, 0.01, device="vulkan")
    assert image.is_cuda
    assert dk.last_device() == "vulkan"
    torch.testing.assert_close(
        image, dk.rasterize(params, size, size, 0.01, device="cuda"), rtol=0, atol=1e-6
    )


def test_strides_counts_and_sigmas_of_their_own() -> None:
    params, targets = scene(3, 20)
    counts = torch.tensor([20, 7, 0], device="cuda")
    sigma = torch.rand(3, 20, device="cuda") * 0.02 + 0.002
    turned = params.transpose(0, 1).contiguous().transpose(0, 1)
    found = dk.fused_loss(turned, targets, sigma, counts=counts, device="vulkan")
    expected = dk.fused_loss(params, targets, sigma, counts=counts, device="cuda")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("scratch", "largest"), [(0, 1 << 30), (0, 20_000), (1 << 30, 30_000)])
def test_a_batch_drawn_in_pieces_is_the_same(
    monkeypatch: pytest.MonkeyPatch, scratch: int, largest: int
) -> None:
    params, targets = scene(3, 12)
    whole = fused(params, targets)
    image = dk.rasterize(params, 70, 70, 0.01, device="vulkan")
    device = devices.default("vulkan").device  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "adapter", replace(device.adapter, largest=largest))
    monkeypatch.setattr(device, "scratch", scratch)
    pieces = fused(params, targets)
    torch.testing.assert_close(pieces[0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(pieces[1], whole[1], rtol=1e-5, atol=1e-7)
    assert torch.equal(dk.rasterize(params, 70, 70, 0.01, device="vulkan"), image)


def test_autograd_through_it() -> None:
    params, targets = scene()
    params.requires_grad_()
    images = targets.permute(0, 3, 1, 2).contiguous()
    dk.fused_mse(params, images, 0.01, device="vulkan").backward()
    found, params.grad = params.grad, None
    dk.fused_mse(params, images, 0.01, device="cuda").backward()
    torch.testing.assert_close(found, params.grad, rtol=1e-3, atol=1e-7)


def test_the_same_bits_on_any_stream_and_in_any_thread() -> None:
    params, targets = scene()
    expected = fused(params, targets)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [fused(params, targets) for _ in range(50)]
        stream.synchronize()
        wrong.extend(i for i, one in enumerate(found) if not same(one, expected))

    in_threads(work)
    assert not wrong


def test_growing_while_another_stream_draws() -> None:
    params, targets = scene()
    large = scene(6, 200, 200)
    expected, expected_large = fused(params, targets), fused(*large)
    dk.shutdown()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        first = fused(params, targets)
    grown = fused(*large)  # frees the buffers that the first one uses, once it is done
    torch.cuda.synchronize()
    assert same(first, expected)
    assert same(grown, expected_large)


def test_it_waits_for_what_was_asked_before_on_its_stream() -> None:
    params, targets = scene()
    expected = fused(params, targets)
    late = torch.zeros_like(params)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(params)
        found = fused(late, targets)
        late.zero_()
    stream.synchronize()
    assert same(found, expected)


def test_the_host_does_not_wait() -> None:
    params, targets = scene()
    fused(params, targets)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    fused(params, targets)
    done.record()
    assert not done.query()


def test_nothing_leaks() -> None:
    params, targets = scene()
    for _ in range(20):
        fused(params, targets)
    torch.cuda.synchronize()
    free, files = torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))
    for _ in range(2_000):
        fused(params, targets)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free
    assert len(os.listdir("/proc/self/fd")) == files
    dk.shutdown()
    counts = []
    for _ in range(4):
        fused(params, targets)
        torch.cuda.synchronize()
        dk.shutdown()
        counts.append((len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info()[0] >> 21))
    assert counts[1] == counts[-1]


def test_a_graph_is_refused_by_name() -> None:
    params, targets = scene()
    fused(params, targets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(DeviceError, match="CUDA graph"), torch.cuda.graph(graph):
        fused(params, targets)
    torch.cuda.synchronize()
    assert same(fused(params, targets), fused(params, targets))


def test_another_device_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    from doublure_kernels.gpu.vulkan import interop

    params, targets = scene()
    expected = fused(params, targets)
    monkeypatch.setattr(interop, "uuid_of", lambda _: "f" * 32)
    with dk.open_device("vulkan") as opened:
        assert not opened.shares(0)
    dk.shutdown()
    torch.testing.assert_close(fused(params, targets)[0], expected[0], rtol=1e-6, atol=0)
    assert not devices.default("vulkan").shares(0)  # type: ignore[attr-defined]
    dk.shutdown()


def test_a_process_ends_cleanly_with_both_alive() -> None:
    code = (
        "import torch, doublure_kernels as dk\n"
        "p = dk.random_params(1, 4, device='cuda')\n"
        "t = torch.zeros(1, 8, 8, 3, device='cuda')\n"
        "dk.fused_loss(p, t, 0.01, device='vulkan'); dk.fused_loss(p, t, 0.01, device='cuda')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
