"""CUDA sources compile with NVRTC, which needs no GPU; what was compiled is kept, and checked."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from doublure_kernels.errors import DeviceError
from doublure_kernels.gpu import plan
from doublure_kernels.gpu.cuda import compiler

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

FUSED = [("LANES", 32), ("MODE", 2), ("COMPACT", 0), ("BBOX6", 0), ("CHANNELS", 3), ("FINE", 0)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "doublure" / "cuda"


def test_all_constants_are_macros() -> None:
    assert tuple(name for name, _ in FUSED) == plan.CONSTANT_NAMES


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_every_variant_compiles(architecture: str) -> None:
    for mode, (compact, bbox) in itertools.product((0, 1, 2), ((0, 0), (1, 1))):
        channels = 3 if mode == 2 else 4
        values = (32, mode, compact, bbox, channels, mode % 2)
        macros = list(zip(plan.CONSTANT_NAMES, values, strict=True))
        code = compiler.compiled(architecture, macros)
        assert code[:4] == b"\x7fELF"
        for kernel in plan.KERNELS:
            assert kernel.encode() in code


def test_what_was_compiled_is_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiler.compiled("sm_90", FUSED)
    (kept,) = folder.iterdir()

    def refuse(*_: object) -> bytes:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", refuse)
        assert compiler.compiled("sm_90", FUSED) == code
        with pytest.raises(AssertionError, match="again"):
            compiler.compiled("sm_80", FUSED)
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")  # damaged
    assert compiler.compiled("sm_90", FUSED) == code
    assert [path.name for path in folder.iterdir()] == [kept.name]


def test_nowhere_to_keep_it_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compiler.compiled("sm_90", FUSED)[:4] == b"\x7fELF"


def test_what_the_compiler_refuses_is_told() -> None:
    with pytest.raises(DeviceError, match='identifier "COMPACT" is undefined'):
        compiler.compiled("sm_90", [("LANES", 32)])
