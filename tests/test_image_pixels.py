"""Every place that decodes an image file gives the same pixels, or refuses the file by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import script_runs
from image_forms import FORMS, lay_out
from PIL import Image

from moh.data.encoding import read_crop
from moh.data.readers import READERS
from moh.errors import RunError
from moh.evaluation.image_sets import FolderImages

SIDE = 8
DEEP = np.arange(0, 65536, 65536 // SIDE**2, dtype=np.uint16).reshape(SIDE, SIDE)
DEEP[-1, -1] = 65535
PLACES = (*FORMS, "score", "latents")


def decoded(place: str, content: bytes, suffix: str, folder: Path) -> np.ndarray:
    """What a place makes of an image file: uint8 (H, W, 3)."""
    if place in FORMS:
        root = lay_out(place, folder, {"only": {f"picture{suffix}": content}})
        return np.asarray(READERS[place](root).image(0))
    path = folder / f"picture{suffix}"
    path.write_bytes(content)
    if place == "score":
        return FolderImages(folder).read(0, 1)[0].movedim(0, -1).numpy()
    return read_crop(path, SIDE).movedim(0, -1).numpy()


def saved(image: Image.Image, suffix: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, Image.registered_extensions()[suffix], **options)
    return content.getvalue()


def big_endian_tiff() -> bytes:
    image = Image.fromarray(DEEP.astype(">u2"))
    assert image.mode == "I;16B"
    return saved(image, ".tif")


DEEP_FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "png": (".png", lambda: saved(Image.fromarray(DEEP), ".png")),
    "tiff": (".tif", lambda: saved(Image.fromarray(DEEP), ".tif")),
    "big-endian tiff": (".tiff", big_endian_tiff),
    "pgm": (
        ".pgm",
        lambda: f"P5\n{SIDE} {SIDE}\n65535\n".encode() + DEEP.astype(">u2").tobytes(),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", DEEP_FILES)
def test_grey_of_16_bits_is_scaled_everywhere(kind, place, tmp_path):
    suffix, content = DEEP_FILES[kind]
    found = decoded(place, content(), suffix, tmp_path)
    expected = np.rint(DEEP / 257).astype(np.uint8)
    assert np.array_equal(found, np.repeat(expected[..., None], 3, axis=-1))


WITHOUT_RULE = {
    "floats": lambda: saved(Image.fromarray(DEEP.astype(np.float32)), ".tif"),
    "32-bit integers": lambda: saved(Image.fromarray(DEEP.astype(np.int32)), ".tif"),
    "CIELAB": lambda: saved(Image.new("LAB", (SIDE, SIDE)), ".tif"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WITHOUT_RULE)
def test_pixels_without_a_rule_are_refused_by_name(kind, place, tmp_path):
    with pytest.raises(RunError, match=r"cannot read image .*(picture|row 0).*mode ") as caught:
        decoded(place, WITHOUT_RULE[kind](), ".tif", tmp_path)
    assert "\n" not in str(caught.value)


def colours(mode: str) -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (SIDE, SIDE, 4), dtype=np.uint8)
    rgba = Image.fromarray(pixels)
    if mode in ("RGBA", "LA"):
        return rgba if mode == "RGBA" else rgba.convert("LA")
    return rgba.convert("RGB").convert(mode)


KINDS = {
    "alpha": (".png", lambda: saved(colours("RGBA"), ".png")),
    "grey with alpha": (".png", lambda: saved(colours("LA"), ".png")),
    "palette": (".png", lambda: saved(colours("P"), ".png")),
    "transparent palette": (".png", lambda: saved(colours("P"), ".png", transparency=0)),
    "one bit": (".png", lambda: saved(colours("1"), ".png")),
    "CMYK": (".jpg", lambda: saved(colours("CMYK"), ".jpg")),
    "YCbCr": (".tif", lambda: saved(colours("YCbCr"), ".tif")),
    "several pages": (
        ".tif",
        lambda: saved(colours("RGB"), ".tif", save_all=True, append_images=[colours("1")]),
    ),
    "animated": (
        ".webp",
        lambda: saved(colours("RGB"), ".webp", save_all=True, append_images=[colours("L")]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_modes_are_pillows_own_conversion_of_the_first_frame(kind, tmp_path):
    suffix, make = KINDS[kind]
    content = make()
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(image.convert("RGB"))
    for place in PLACES:
        (tmp_path / place).mkdir()
        assert np.array_equal(decoded(place, content, suffix, tmp_path / place), expected), place


def test_what_counts_as_a_picture_is_the_same_everywhere(tmp_path, capsys):
    picture = saved(colours("RGB"), ".png")
    names = ("a.PNG", "b.Jpg", "c.JPEG", "d.webp", "e.TIF", "f.tiff", "g.bmp", "h.ppm", "i.pgm")
    hidden = ("._a.png", ".DS_Store", ".thumbs.jpg")
    others = ("notes.txt", "film.mp4", "archive.jpg.part")
    files = dict.fromkeys(names, picture) | dict.fromkeys((*hidden, *others), b"no picture")
    for form in ("folder", "tar", "webdataset"):
        root = lay_out(form, tmp_path / form, {"only": files})
        reader = READERS[form](root)
        assert len(reader) == len(names), form
        found = {Path(reader.name(i)).stem for i in range(len(reader))}
        assert found == {Path(name).stem for name in names}
        assert all(reader.image(i).size == (SIDE, SIDE) for i in range(len(reader)))
        told = capsys.readouterr().err
        if form != "webdataset":  # whose members may be of any kind
            assert told.count("\n") == 1
            assert "3 files left out" in told
            assert all(name in told for name in others)
            assert not any(name in told for name in hidden)
    # Hidden folders, of a class and of the whole.
    for place in (".cache", "only/.cache"):
        (tmp_path / "folder" / place).mkdir()
        (tmp_path / "folder" / place / "j.png").write_bytes(picture)
    reader = READERS["folder"](tmp_path / "folder")
    assert reader.class_names == ("only",)
    assert len(reader) == len(names)
    capsys.readouterr()
    assert len(FolderImages(tmp_path / "folder" / "only")) == len(names)
    assert "3 files left out" in capsys.readouterr().err
    assert len(FolderImages(tmp_path / "folder")) == len(names)


def test_many_left_out_files_are_counted_and_the_first_named(tmp_path, capsys):
    files = {f"{i:02d}.txt": b"" for i in range(20)} | {"a.png": saved(colours("L"), ".png")}
    READERS["folder"](lay_out("folder", tmp_path, {"only": files}))
    told = capsys.readouterr().err
    assert "20 files left out" in told
    assert "05.txt and 14 more" in told


def test_classes_without_an_image_are_named(tmp_path):
    picture = saved(colours("L"), ".png")
    files = {"full": {"a.png": picture}, "text": {"a.txt": b""}, "hidden": {"._a.png": picture}}
    with pytest.raises(RunError, match=r"no image \(.*\.png.*\) of class hidden, text$"):
        READERS["folder"](lay_out("folder", tmp_path, files))


def test_the_check_of_imagenet_decodes_as_training_does(tmp_path):
    for split in ("train", "val"):
        files = {"deep.png": saved(Image.fromarray(DEEP), ".png"), "._deep.png": b"no picture"}
        lay_out("folder", tmp_path / split, {"n01": files})
    (tmp_path / "train" / ".cache").mkdir()
    arguments = ("check", tmp_path, "--classes", 1, "--train", 1, "--val", 1, "--workers", 1)
    journal = ("--journal", tmp_path / "journal")
    assert "all as it should be" in script_runs.finish("prepare_imagenet", *arguments, *journal)
    floats = WITHOUT_RULE["floats"]()
    (tmp_path / "val" / "n01" / "deep.png").write_bytes(floats)
    told = script_runs.finish("prepare_imagenet", *arguments, *journal, status=1)
    assert "val/n01/deep.png: pixels of mode F" in told
