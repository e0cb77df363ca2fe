"""Every example of docs/rasterizer.md runs, in order, as one program."""

import re
from pathlib import Path
from typing import Any

import doublure_kernels as dk
import pytest
import torch
from doublure_kernels import second_order

PAGE = Path(__file__).parents[2] / "docs" / "rasterizer.md"


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doublure_kernels.api._warned", False)
    torch._dynamo.reset()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    assert len(blocks) >= 10
    names: dict[str, Any] = {}
    for block in blocks:
        line = PAGE.read_text()[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)  # lines as on the page


def test_figures_and_names_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"{second_order.SECOND_ORDER_PAIRS:,}" in text
    for name in dk.__all__:
        if name.endswith("Error") and name not in ("ImageError", "ResumeError"):  # the fitter's
            assert f"`{name}`" in text
        if name.islower():
            assert re.search(rf"\b{name}\b", text), name
