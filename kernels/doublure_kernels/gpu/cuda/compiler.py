"""CUDA kernels from the package's sources: compiled once a machine by NVRTC, then read from disk.

torch's CUDA wheels bring NVRTC. What is kept is machine code for one architecture, under
`XDG_CACHE_HOME/doublure/cuda`, named by a digest of sources, options and compiler.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from typing import Any

from ...errors import DeviceError
from .. import cache

__all__ = ["compiled", "sources"]

_log = logging.getLogger(__name__)

_NAMES = ("raster.cu", "cuda.h", "raster.h")


def sources() -> dict[str, bytes]:
    """The kernels' text by file name; the first is the one that is compiled."""
    folder = files("doublure_kernels.gpu") / "shaders"
    return {name: (folder / name).read_bytes() for name in _NAMES}


def compiled(architecture: str, macros: Sequence[tuple[str, int]]) -> bytes:
    """Machine code (a cubin) of all kernels.

    Args:
        architecture: As NVRTC calls it, such as `sm_90`.
        macros: Names and values that the sources are compiled with.
    Raises:
        DeviceError: NVRTC is not there, or refuses; its log is in the text.
    """
    nvrtc = _nvrtc()
    text = sources()
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in macros),
    ]
    version = _checked(nvrtc, nvrtc.nvrtcVersion(), "nvrtcVersion")
    digest = hashlib.sha256(repr((version, options, sorted(text.items()))).encode()).hexdigest()
    folder = cache.folder("cuda")
    path = None if folder is None else folder / f"{digest}.cubin"
    kept = cache.kept(path)
    if kept is not None:
        return kept
    code: bytes = _compile(nvrtc, text, options)
    cache.keep(path, code)
    return code


def _nvrtc() -> Any:
    try:
        return import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise DeviceError(
            'device "cuda": expected the package cuda-bindings, got an environment without it; '
            "install the one of torch's CUDA version, such as cuda-bindings==13.*"
        ) from error


def _compile(nvrtc: Any, text: dict[str, bytes], options: list[str]) -> bytes:
    main, *headers = _NAMES
    try:
        program = _checked(
            nvrtc,
            nvrtc.nvrtcCreateProgram(
                text[main],
                main.encode(),
                len(headers),
                [text[name] for name in headers],
                [name.encode() for name in headers],
            ),
            "nvrtcCreateProgram",
        )
    except RuntimeError as error:  # the library itself was not found
        raise DeviceError(
            'device "cuda": expected the NVRTC library that torch\'s CUDA wheels bring, got: '
            f"{error}; install nvidia-cuda-nvrtc"
        ) from error
    notice = threading.Timer(
        1.0, _log.warning, ("compiling the rasterizer for this GPU, once a machine",)
    )
    notice.daemon = True
    notice.start()
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            size = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "log")
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DeviceError(
                f'device "cuda": expected kernels that NVRTC compiles with {options}, got '
                f"{status}: {log.decode(errors='replace').strip(chr(0))}"
            )
        size = _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        code: bytes = b" " * size
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        notice.cancel()
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(nvrtc: Any, result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f'device "cuda": expected {what} to succeed, got {status}')
    return values[0] if len(values) == 1 else tuple(values)
