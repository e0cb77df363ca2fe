"""Settings of a fit: what is refused, and in which words."""

import dataclasses
import json

import numpy as np
import pytest
from doublure_kernels.errors import SettingError
from doublure_kernels.fit import FitSettings
from doublure_kernels.fit.runs import Outputs
from doublure_kernels.fit.settings import parse_colour


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"triangles": 0}, "triangles: expected 1 to 1,000,000, got 0"),
        ({"triangles": 2.5}, "triangles: expected a whole number, got 2.5"),
        ({"iterations": True}, "iterations: expected a whole number, got True"),
        ({"size": 0}, "size: expected 1 to 16,384, got 0"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"patience": -1}, "patience: expected 0 to"),
        ({"sigma_start": 0.0}, "sigma_start: expected over 0.0 below 10.0, got 0.0"),
        ({"sigma_start": float("nan")}, "sigma_start: expected over 0.0"),
        ({"sigma_start": "wide"}, "sigma_start: expected a number, got 'wide'"),
        ({"sigma_end": 0.5}, "sigma_end: expected at most sigma_start, 0.02, got 0.5"),
        ({"position_rate": -0.1}, "position_rate: expected from 0.0 to 1.0, got -0.1"),
        ({"beta1": 1.0}, "beta1, beta2: expected less than 1"),
        ({"divergence": 0.5}, "divergence: expected over 1.0"),
        ({"coarse": -1}, "coarse: expected from 0.0"),
        ({"start": "detial"}, "start: expected one of detail, random; got 'detial'; did you mean"),
        ({"kernel": "box"}, "kernel: expected one of sigmoid, compact; got 'box'"),
        ({"background": "mauve"}, "background: expected mean, black, white, grey, gray or #rrggbb"),
    ],
)
def test_wrong_values_are_refused_with_what_was_expected(values: dict, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        FitSettings(**values)
    assert said in str(caught.value)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(SettingError, match="'iteration'; did you mean iterations"):
        FitSettings.from_dict({"iteration": 3})


def test_numbers_of_numpys_become_plain_ones() -> None:
    one = FitSettings(triangles=np.int64(3), sigma_start=np.float32(0.5))
    assert one == FitSettings(triangles=3, sigma_start=0.5)
    assert json.loads(json.dumps(one.to_dict())) == one.to_dict()


def test_settings_survive_their_own_dictionary() -> None:
    one = FitSettings(triangles=3, sigma_end=0.001, background="#abc", kernel="compact")
    assert FitSettings.from_dict(one.to_dict()) == one
    assert set(one.to_dict()) == {field.name for field in dataclasses.fields(FitSettings)}


def test_the_last_sigma_is_at_least_a_quarter_of_a_pixel_unless_it_was_named() -> None:
    assert FitSettings().last_sigma(192, 192) == 0.0015
    assert FitSettings().last_sigma(50, 100) == 0.0025
    assert FitSettings().last_sigma(2, 2) == 0.02  # never above the first one
    assert FitSettings(sigma_end=0.001).last_sigma(50, 100) == 0.001


@pytest.mark.parametrize(
    ("text", "colour"),
    [("#fff", (255, 255, 255)), ("a0B1c2", (160, 177, 194)), ("black", (0, 0, 0))],
)
def test_colours(text: str, colour: tuple) -> None:
    assert parse_colour(text, "matte") == colour


@pytest.mark.parametrize("text", ["", "#ff", "#gggggg", "mean", "#ffffff0"])
def test_what_is_no_colour(text: str) -> None:
    with pytest.raises(SettingError, match=r"matte: expected black, white, grey, gray or #rrggbb"):
        parse_colour(text, "matte")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"export_size": 0}, "export_size: expected 1 to 16,384 pixels, got 0"),
        ({"frames_every": -1}, "frames_every: expected 0 or more, got -1"),
        ({"animation": "webm"}, "animation: expected gif, apng or none, got 'webm'"),
        ({"fps": 0.0}, "fps: expected 0.1 to 50, got 0.0"),
    ],
)
def test_wrong_outputs_are_refused(values: dict, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        Outputs(**values)
    assert said in str(caught.value)
