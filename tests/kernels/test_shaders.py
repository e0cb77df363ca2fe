"""The SPIR-V that ships is that of the sources that ship, and valid."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from doublure_kernels.gpu import plan

SHADERS = Path(plan.__file__).parent / "shaders"
DIGESTS = SHADERS / "digests.txt"

needs_compiler = pytest.mark.skipif(
    shutil.which("glslangValidator") is None, reason="glslangValidator is not installed"
)
needs_validator = pytest.mark.skipif(
    shutil.which("spirv-val") is None, reason="spirv-val is not installed"
)


def recorded() -> tuple[str, dict[str, str]]:
    """The compiler's version, and digests by file name."""
    version, *lines = DIGESTS.read_text().splitlines()
    pairs = [line.split() for line in lines]
    return version.removeprefix("# "), {name: digest for digest, name in pairs}


def stale(folder: Path) -> list[str]:
    """Files that are not what they were when the shaders were compiled, and missing ones."""
    _, digests = recorded()
    return [
        name
        for name, digest in digests.items()
        if not (folder / name).exists()
        or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def words(path: Path) -> bytes:
    """Its code without the word that names the generator."""
    code = path.read_bytes()
    return code[:8] + code[12:]


def test_every_kernel_and_every_source_is_recorded() -> None:
    _, digests = recorded()
    files = {path.name for path in SHADERS.glob("*.comp")} | {"glsl.h", "raster.h"}
    assert set(digests) == files | {f"{name}.spv" for name in plan.KERNELS}
    assert {f"{name}.comp" for name in plan.KERNELS} <= files


def test_what_ships_was_compiled_from_the_sources_that_ship() -> None:
    assert not stale(SHADERS), "run scripts/shaders"


def test_a_change_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "shaders"
    shutil.copytree(SHADERS, copy)
    assert not stale(copy)
    with (copy / "raster.h").open("a") as file:
        file.write("\n")
    (copy / "draw.spv").unlink()
    assert sorted(stale(copy)) == ["draw.spv", "raster.h"]


@needs_compiler
@pytest.mark.parametrize("kernel", plan.KERNELS)
def test_the_same_compiler_gives_the_same_code(kernel: str, tmp_path: Path) -> None:
    version = subprocess.run(["glslangValidator", "--version"], capture_output=True, text=True)
    made = tmp_path / f"{kernel}.spv"
    source = SHADERS / f"{kernel}.comp"
    command = ["glslangValidator", "-V", "--target-env", "vulkan1.1", "-o", made, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    if words(made) == words(SHADERS / f"{kernel}.spv"):
        return
    here = version.stdout.splitlines()[0]
    assert here != recorded()[0], "run scripts/shaders"
    pytest.skip(f"another compiler than it was made with, and other code: {here}")


@needs_validator
@pytest.mark.parametrize("kernel", plan.KERNELS)
def test_what_ships_is_valid(kernel: str) -> None:
    command = ["spirv-val", "--target-env", "vulkan1.1", SHADERS / f"{kernel}.spv"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
