"""Live weights on disk: what was drawn with is what is read."""

from pathlib import Path

import numpy as np
import pytest
from doublure_bridge import ModelFileError, read_model
from doublure_plugin.evaluate import Evaluator
from doublure_plugin.save import save_model

from .test_weights import GRID, SESSION, SOURCE, check, weights


def test_saved_weights_read_back(tmp_path: Path) -> None:
    live = check(weights(SESSION, 3, spec=GRID))
    test = {"psnr_db": 40.5, "relmse": float("nan")}
    path = save_model(
        live, tmp_path / "m", name="edges", parameter=(0.0, 4.0), resolution=(64, 32), test=test
    )
    assert path == tmp_path / "m" / "weights.safetensors"
    for file in (path, path.with_suffix(".json")):
        model = read_model(file)
        assert (model.name, model.parameter, model.steps) == ("edges", (0.0, 4.0), live.step)
        assert model.source_digest == SOURCE.hex()
        assert model.scores["test"] == {"psnr_db": 40.5}
        assert model.scores["held_out"] is not None
        assert model.probes is not None
        points, colours = model.probes
        assert Evaluator(model.spec, model.tensors)(points) == pytest.approx(colours, abs=1e-4)
        for name, tensor in live.tensors.items():
            assert np.array_equal(model.tensors[name], tensor)


def test_a_parameter_that_is_no_range_is_refused(tmp_path: Path) -> None:
    live = check(weights(SESSION, 3, spec=GRID))
    with pytest.raises(ModelFileError, match=r"model\.parameter: expected two finite numbers"):
        save_model(live, tmp_path / "m", name="edges", parameter=(1.0, 1.0))
