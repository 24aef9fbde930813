"""Image files that would start programs, wait for ever or fill the memory."""

from __future__ import annotations

import io
import os
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.image_files import RNG
from PIL import Image

from fedaux.data import decoding
from fedaux.data.decoding import FORMATS, MOST_PIXELS, decode, picture_size

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


def random_picture(mode: str, width: int, height: int) -> Image.Image:
    pixels = RNG(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode == "P":
        return Image.fromarray(pixels[..., :3]).quantize(7)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(pixels, mode="RGBA").convert(mode)


def blank_png(width: int, height: int) -> bytes:
    """Return a small file of a large transparent image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(b"\0" * (1 + 4 * width)) for _ in range(height))
    parts = [(b"IHDR", header), (b"IDAT", pixels + packer.flush()), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


def test_no_program_is_started_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives EPS to Ghostscript, whatever the file is called."""
    program, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    (tmp_path / "scan.png").write_bytes(EPS)
    for content in (EPS, tmp_path / "scan.png"):
        with pytest.raises(ValueError, match="cannot identify image file"):
            decode(content, side=8)
        assert picture_size(content) is None
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["AVIF", "ICO", "JPEG2000", "PCX", "SGI", "TGA"])
def test_other_formats_are_refused(kind: str) -> None:
    content = encoded(random_picture("RGB", 16, 16), kind)
    with pytest.raises(ValueError, match="cannot identify image file"):
        decode(content)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_formats_are_decoded(kind: str) -> None:
    content = encoded(random_picture("RGB", 16, 12), kind)
    assert decode(content, channels=3, side=4).shape == (3, 4, 4)
    assert picture_size(content) == (12, 16)


def test_a_fifo_a_folder_and_a_device_are_no_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    for place in (tmp_path / "fifo.png", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match=r"is no regular file|Is a directory"):
            decode(place)
        assert picture_size(place) is None


def test_too_many_pixels_or_bytes_are_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = bytearray(blank_png(8, 8))
    for width, height in ((6000, 6000), (2**25, 1)):
        content[16:24] = struct.pack(">II", width, height)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        with pytest.raises(ValueError, match=rf"{width}x{height} pixels; should be at most"):
            decode(bytes(content))
    monkeypatch.setattr(decoding, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="bytes; should be at most 100"):
        decode(encoded(random_picture("RGB", 16, 16), "PNG"))


def jpeg_of_scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan comes `count` times."""
    content = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * count + content[-2:]


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each takes as long as the whole image: one file of a megabyte took ten minutes."""
    assert decode(jpeg_of_scans(20), side=8).shape == (1, 8, 8)
    with pytest.raises(ValueError, match=r"\d+ scans; should be at most 100"):
        decode(jpeg_of_scans(200), side=8)


def tiff_of_tile(side: int) -> bytes:
    """Return a TIFF of 8x8 pixels in one tile."""
    data = zlib.compress(bytes(2**14))
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8}
    tags[325] = len(data)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    start = b"II*\0" + struct.pack("<I", 8 + len(data)) + data
    return start + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_a_tiff_of_one_large_tile_is_refused() -> None:
    """A tile is decoded as a whole: eight pixels took 1.3 GB."""
    assert decode(tiff_of_tile(128)).shape == (1, 8, 8)
    with pytest.raises(ValueError, match="a tile of 67108864 pixels; should be at most"):
        decode(tiff_of_tile(2**13))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3, None])
def test_strips_of_a_large_image_are_converted_as_a_whole(
    mode: str, channels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded(random_picture(mode, 61, 47), "TIFF" if mode == "CMYK" else "PNG")
    lost: list[set[str]] = [set(), set()]
    whole = decode(content, channels=channels, side=13, lost=lost[0])
    monkeypatch.setattr(decoding, "LARGE_PIXELS", 100)
    monkeypatch.setattr(decoding, "STRIP_PIXELS", 61 * 5)
    in_strips = decode(content, channels=channels, side=13, lost=lost[1])
    assert (whole == in_strips).all()
    assert lost[0] == lost[1]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_large_image_is_shrunk_on_the_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result differs from that of the whole image by at most 3 %: both are averages."""
    rows, columns = np.mgrid[:300, :410]
    smooth = np.stack([rows / 300, columns / 410, 0.5 + 0 * rows], axis=2)
    content = encoded(Image.fromarray((255 * smooth).astype(np.uint8)), kind)
    whole = decode(content, side=9)
    monkeypatch.setattr(decoding, "LARGE_PIXELS", 100)
    monkeypatch.setattr(decoding, "STRIP_PIXELS", 1000)
    assert np.abs(decode(content, side=9).astype(int) - whole).max() <= 8


@pytest.mark.slow
def test_the_largest_image_takes_less_than_180_megabytes(tmp_path: Path) -> None:
    """Besides the libraries, which take 240 MB, or 530 with PyTorch's build for CUDA."""
    side = int(MOST_PIXELS**0.5)
    (tmp_path / "large.png").write_bytes(blank_png(side, side))
    program = (
        "import re, sys; from pathlib import Path; from fedaux.data.decoding import decode;"
        "peak = lambda: re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1];"
        "before = peak();"
        "print(decode(Path(sys.argv[1]), channels=1, side=32, lost=set()).mean(), before, peak())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "large.png")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    mean, before, after = map(float, told.stdout.split())
    assert mean == 255.0
    assert after - before < 180_000, (before, after)
