"""Own data: three clinics with a folder of images each, of which none has all classes, and public
images.

    python examples/own_data.py
    python examples/own_data.py --quick

The images are drawn here; put yours in folders of this form, CLINIC/CLASS/IMAGE.png, and leave the
drawing out.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

import fedaux

HOLDINGS = {"clinic_a": ["round", "square"], "clinic_b": ["square"], "clinic_c": ["cross", "round"]}
"""Which classes a clinic has. They are joined by the names of their folders."""


def draw(finding: str, lots: random.Random) -> Image.Image:
    """Return a grey image of 16 by 16 points with one shape somewhere."""
    image = Image.new("L", (16, 16), lots.randrange(60))
    pen, left, top, side = (
        ImageDraw.Draw(image),
        lots.randrange(1, 6),
        lots.randrange(1, 6),
        lots.randrange(6, 9),
    )
    box = (left, top, left + side, top + side)
    if finding == "round":
        pen.ellipse(box, fill=lots.randrange(120, 256))
    elif finding == "square":
        pen.rectangle(box, fill=lots.randrange(120, 256))
    else:
        pen.line(box, fill=lots.randrange(120, 256), width=2)
        pen.line((left, top + side, left + side, top), fill=lots.randrange(120, 256), width=2)
    return image


def write_folder(folder: Path, findings: list[str], *, size: int, lots: random.Random) -> None:
    """Write `size` images of each class into a folder of its name."""
    for finding in findings:
        (folder / finding).mkdir(parents=True)
        for number in range(size):
            draw(finding, lots).save(folder / finding / f"{number}.png")


def main(*, quick: bool, out: Path) -> None:
    """Draw the images, and run a method with and one without distillation on them."""
    images, size, lots = out / "images", 40 if quick else 200, random.Random(0)
    for clinic, findings in HOLDINGS.items():
        write_folder(images / clinic, findings, size=size, lots=lots)
    write_folder(images / "test", ["round", "square", "cross"], size=size, lots=lots)
    write_folder(
        images / "public", ["round", "square", "cross"], size=2 * size, lots=lots
    )  # names are not looked at

    experiment = fedaux.Experiment(
        name="clinics",
        method=["fedaux", "fedavg+p"],
        rounds=1 if quick else 10,
        participation_rate=1.0,
        data={
            "source": "folder",
            "clients": [
                str(images / clinic) for clinic in HOLDINGS
            ],  # a folder a client: nothing is split
            "test": str(images / "test"),  # without it, a fifth of each client's images is held out
        },
        auxiliary={"source": "folder", "path": str(images / "public")},
        prototypes=[{"name": "cnn", "model": "cnn", "options": {"width": 16}}],
        pretraining={"epochs": 1 if quick else 10, "batch_size": 60},
        certainty={"epsilon": 0.5, "components": 8},
        local={"learning_rate": 3e-3},
        distillation={"learning_rate": 3e-4},
    )
    result = fedaux.run(experiment, out=out / "run")
    for row in result.summary["rows"]:
        print(
            f"{row['method']}: {row['accuracy_mean']:.1%} of the test images after the last round"
        )
    print(f"Who holds what, and everything else: {result.directory / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same with less")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/clinics"), help="a folder that is not there yet"
    )
    main(**vars(parser.parse_args()))
