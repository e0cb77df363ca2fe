"""Reading pictures: every mode of Pillow's, the sRGB curve, and what cannot be read."""

import io
from pathlib import Path

import numpy as np
import pytest
from doublure_kernels.errors import ImageError, ShapeError
from doublure_kernels.fit import linear_to_srgb, read_photo, reduce_linear, srgb_to_linear
from doublure_kernels.fit.pictures import to_bytes
from PIL import Image, ImageCms


def curve(byte: float) -> float:
    """sRGB to linear as its standard states it, one value at a time."""
    value = byte / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_the_curve_is_that_of_the_standard_and_its_inverse_takes_it_back() -> None:
    values = np.linspace(0, 1, 1001)
    expected = np.array([curve(255 * value) for value in values])
    np.testing.assert_allclose(srgb_to_linear(values), expected, rtol=1e-14)
    np.testing.assert_allclose(linear_to_srgb(srgb_to_linear(values)), values, atol=2e-7)
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_bytes(srgb_to_linear(every / 255.0)), every)
    assert srgb_to_linear(np.float32([0.5])).dtype == np.float32


def test_bytes_are_cut_and_never_wrap() -> None:
    np.testing.assert_array_equal(to_bytes(np.array([-1.0, 0.0, 1.0, 7.0])), [0, 0, 255, 255])


def test_averages_are_of_light_and_exact_for_sizes_that_do_not_divide() -> None:
    pixels = np.random.default_rng(0).random((7, 5, 3))
    small = reduce_linear(pixels, 3, 2)
    fine = np.repeat(np.repeat(pixels, 6, axis=0), 4, axis=1)  # [42, 20]: whole blocks of 14 x 10
    expected = fine.reshape(3, 14, 2, 10, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(small, expected, atol=1e-6)
    np.testing.assert_allclose(reduce_linear(pixels, 7, 5), pixels, atol=1e-7)
    with pytest.raises(ShapeError, match=r"expected 1 x 1 to 5 x 7, got 2 x 8"):
        reduce_linear(pixels, 8, 2)
    with pytest.raises(ShapeError, match=r"expected \[H, W, 3\]"):
        reduce_linear(pixels[..., 0], 2, 2)


COLOUR = (200, 60, 20)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBX", "YCbCr", "HSV", "LAB", "CMYK", "P", "PA"])
def test_colour_modes(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (6, 4), COLOUR)
    if mode == "LAB":
        to_lab = ImageCms.buildTransform(
            ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
        )
        image = ImageCms.applyTransform(image, to_lab)
    elif mode == "PA":
        image = image.convert("P").convert("PA")
    else:
        image = image.convert(mode)
    kind = {"RGB": "png", "RGBA": "png", "P": "png"}.get(mode, "tif")
    if mode in ("HSV", "PA", "RGBX"):
        # No file format of Pillow's brings these; the decoder behind the reader does not care.
        from doublure_kernels.fit.pictures import _reduced

        pixels = _reduced(image, 6, (255, 255, 255), "memory")
    else:
        path = saved(tmp_path / f"a.{kind}", image)
        pixels = read_photo(path, 6).pixels
    assert pixels.shape == (4, 6, 3)
    assert pixels.dtype == np.float32
    # LAB, HSV and the web palette round in their own steps.
    atol = {"LAB": 0.02, "HSV": 0.02, "P": 0.06, "PA": 0.06}.get(mode, 0.008)
    np.testing.assert_allclose(pixels[0, 0], [curve(c) for c in COLOUR], atol=atol)


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (Image.new("L", (3, 2), 128), curve(128)),
        (Image.new("1", (3, 2), 1), 1.0),
        (Image.fromarray(np.full((2, 3), 32768, np.uint16)), curve(255 * 32768 / 65535)),
        (Image.fromarray(np.full((2, 3), 1000, np.int32)), curve(255 * 1000 / 65535)),
        (Image.fromarray(np.full((2, 3), 0.25, np.float32)), 0.25),
    ],
    ids=["L", "1", "16 bits", "32 bits", "float"],
)
def test_grey_modes(image: Image.Image, value: float, tmp_path: Path) -> None:
    pixels = read_photo(saved(tmp_path / "a.tif", image), 3).pixels
    assert pixels.shape == (2, 3, 3)
    np.testing.assert_allclose(pixels, value, rtol=1e-5)


def test_sixteen_bits_of_grey_in_a_png_keep_their_steps(tmp_path: Path) -> None:
    ramp = np.arange(0, 65536, 257, dtype=np.uint16)[None] + np.uint16(1)
    ramp = np.minimum(ramp, 65534)
    pixels = read_photo(saved(tmp_path / "a.png", Image.fromarray(ramp)), 512).pixels
    np.testing.assert_allclose(
        pixels[0, :, 1], [curve(255 * int(v) / 65535) for v in ramp[0]], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.full((2, 2), 1.5, np.float32), "expected floating light from 0 to 1, got 1.5 to 1.5"),
        (np.full((2, 2), np.nan, np.float32), "expected floating light from 0 to 1, got nan"),
        (np.full((2, 2), -3, np.int32), "expected grey from 0 to 65535, got -3 to -3"),
    ],
)
def test_light_out_of_range_is_refused(values: np.ndarray, said: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tif", Image.fromarray(values))
    with pytest.raises(ImageError) as caught:
        read_photo(path, 2)
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_lies_over_the_matte_in_linear_light(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 102))
    if mode == "P":
        image = Image.new("P", (2, 2), 0)
        image.putpalette([0, 0, 0])
        image.info["transparency"] = b"\x66"
    path = saved(tmp_path / "a.png", image if mode == "P" else image.convert(mode))
    np.testing.assert_allclose(read_photo(path, 2).pixels, 0.6, atol=1e-6)
    on_red = read_photo(path, 2, matte=(255, 0, 0)).pixels
    np.testing.assert_allclose(on_red[0, 0], [0.6, 0, 0], atol=1e-6)


def test_orientation_is_honoured(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 4), "black")
    image.paste((255, 255, 255), (0, 0, 4, 4))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise: left becomes top
    photo = read_photo(saved(tmp_path / "a.png", image, exif=exif), 100)
    assert photo.original_size == (4, 8)
    assert photo.pixels.shape == (8, 4, 3)
    np.testing.assert_allclose(photo.pixels[:4], 1.0)
    np.testing.assert_allclose(photo.pixels[4:], 0.0)


def test_a_colour_profile_is_applied(tmp_path: Path) -> None:
    """In a profile whose primaries are exchanged, red is what sRGB calls green."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    table = {bytes(profile[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(profile[131])}
    red, green = table[b"rXYZ"], table[b"gXYZ"]
    profile[red + 4 : red + 12], profile[green + 4 : green + 12] = (
        profile[green + 4 : green + 12],
        profile[red + 4 : red + 12],
    )
    image = Image.new("RGB", (2, 2), (255, 0, 0))
    path = saved(tmp_path / "a.png", image, icc_profile=bytes(profile))
    np.testing.assert_allclose(read_photo(path, 2).pixels[0, 0], [0, 1, 0], atol=0.01)
    broken = saved(tmp_path / "b.png", image, icc_profile=b"nonsense")
    np.testing.assert_allclose(read_photo(broken, 2).pixels[0, 0], [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("size", "shape"),
    [((400, 100), (25, 100)), ((100, 400), (100, 25)), ((1000, 1), (1, 100)), ((30, 20), (20, 30))],
)
def test_proportions_are_kept_and_nothing_is_enlarged(
    size: tuple, shape: tuple, tmp_path: Path
) -> None:
    photo = read_photo(saved(tmp_path / "a.png", Image.new("RGB", size, "grey")), 100)
    assert photo.pixels.shape == (*shape, 3)
    assert photo.original_size == size
    np.testing.assert_allclose(photo.pixels, curve(128), atol=1e-6)


def test_bands_of_rows_are_put_together_without_seams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (97, 31, 3), np.uint8)
    path = saved(tmp_path / "a.png", Image.fromarray(noise))
    whole = read_photo(path, 40).pixels
    monkeypatch.setattr("doublure_kernels.fit.pictures._BAND", 31 * 5)
    np.testing.assert_allclose(read_photo(path, 40).pixels, whole, atol=1e-7)


def jpeg() -> bytes:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


def png() -> bytes:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot identify image file"),
        (b"not a picture", "cannot identify image file"),
        (jpeg()[:2000], "truncated"),
        (png()[:3000], "truncated"),
        (png()[:3000] + b"\0" * 400 + png()[3400:], "broken"),
        (b"P6 0 0 255 ", ""),
    ],
    ids=["empty", "text", "half a JPEG", "half a PNG", "damaged PNG", "no pixels"],
)
def test_what_is_no_whole_picture_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        read_photo(path, 64)
    text = str(caught.value)
    assert "a.bin" in text
    assert "expected" in text
    assert said in text


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"expected a picture, got no file of that name"):
        read_photo(tmp_path / "a.png", 64)
    with pytest.raises(ImageError, match="Is a directory"):
        read_photo(tmp_path, 64)


def test_bombs_are_refused_but_large_photographs_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a.png", Image.new("RGB", (60, 50), "grey"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    assert read_photo(path, 10).pixels.shape == (8, 10, 3)  # Pillow would warn here
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"expected at most 2,000 pixels, got more"):
        read_photo(path, 10)
    monkeypatch.setattr("doublure_kernels.fit.pictures._MAX_SIDE", 55)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ImageError, match=r"expected sides of at most 55 pixels, got 60 x 50"):
        read_photo(path, 10)
