"""What an encoder expects of its inputs, from its own processor files: size, colours, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from fedaux.data.decoding import Content, Pixels, decode
from fedaux.files import read_json

Resize = Literal["stretch", "crop", "pad"]
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
PIXEL_SCALE = 255.0
POOLINGS = ("mean", "cls", "max", "lasttoken")
INTERPOLATIONS = tuple(one.name.lower() for one in Image.Resampling)
MOST_TOKENS = 512
Side = Annotated[int, Field(gt=0, le=2**12)]


@dataclass(frozen=True)
class Images:
    """Images of any size to pixels [C, height, width], then (pixels / 255 - mean) / deviation."""

    height: Side
    width: Side
    mean: tuple[FiniteFloat, ...]
    deviation: tuple[Annotated[FiniteFloat, Field(gt=0)], ...]
    resize: Resize = "crop"
    """`crop`: the shorter side becomes `shorter`, and the middle is kept; `stretch` changes the
    proportions; `pad` adds margins in the mean colour."""
    shorter: Annotated[int, Field(ge=0, le=2**13)] = 0
    """Length of the shorter side before cropping; 0 is the smallest that fills the image."""
    interpolation: Annotated[str, Field(pattern=rf"^({'|'.join(INTERPOLATIONS)})$")] = "bilinear"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return len(self.mean), self.height, self.width

    def pixels(self, content: Content) -> Pixels:
        """Return one image as uint8 [C, height, width]. Raises ValueError if it is unreadable."""
        side = max(self.height, self.width, self.shorter)
        return decode(content, channels=len(self.mean), side=side, fit=self._fitted)

    def _fitted(self, picture: Image.Image) -> Image.Image:
        method = Image.Resampling[self.interpolation.upper()]
        (width, height), target = picture.size, (self.width, self.height)
        if self.resize == "stretch":
            return picture.resize(target, method)
        ratios = self.width / width, self.height / height
        if self.resize == "pad":
            ratio = min(ratios)
            size = max(1, round(width * ratio)), max(1, round(height * ratio))
            colour = tuple(round(PIXEL_SCALE * min(max(one, 0.0), 1.0)) for one in self.mean)
            padded = Image.new(picture.mode, target, colour if len(colour) > 1 else colour[0])
            corner = (target[0] - size[0]) // 2, (target[1] - size[1]) // 2
            padded.paste(picture.resize(size, method), corner)
            return padded
        ratio = max(*ratios, self.shorter / min(width, height))
        # Only the part that is kept is resized.
        kept = min(width, self.width / ratio), min(height, self.height / ratio)
        left, top = (width - kept[0]) / 2, (height - kept[1]) / 2
        return picture.resize(target, method, box=(left, top, width - left, height - top))

    def __str__(self) -> str:
        how = {
            "stretch": "stretched",
            "pad": "padded",
            "crop": f"shorter side to {self.shorter}, cropped" if self.shorter else "cropped",
        }[self.resize]
        numbers = [" ".join(f"{one:.4g}" for one in part) for part in (self.mean, self.deviation)]
        return (
            f"{self.width}x{self.height}, {how}, {self.interpolation}; mean {numbers[0]}, "
            f"deviation {numbers[1]}"
        )


@dataclass(frozen=True)
class Tokens:
    """Texts to at most `length` token ids, and token vectors to one vector per text."""

    length: Annotated[int, Field(gt=0, le=2**16)]
    pooling: Annotated[str, Field(pattern=rf"^({'|'.join(POOLINGS)})$")] = "mean"
    normalise: bool = False
    """Whether vectors are divided by their norm."""
    padding: Annotated[int, Field(ge=0)] = 0
    """The id of the padding token."""

    def __str__(self) -> str:
        unit = ", unit length" if self.normalise else ""
        return f"up to {self.length} tokens, pooling {self.pooling}{unit}"


Preprocessing = Images | Tokens


def to_json(inputs: Preprocessing) -> dict[str, Any]:
    """Return preprocessing as JSON."""
    return {"kind": "image" if isinstance(inputs, Images) else "text", **asdict(inputs)}


def from_json(about: Mapping[str, Any]) -> Preprocessing:
    """Return preprocessing that `to_json` wrote. Raises ValueError for other content."""
    values = {name: value for name, value in about.items() if name != "kind"}
    kind: type[Preprocessing] = Tokens if about.get("kind") == "text" else Images
    try:
        made: Preprocessing = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"its preprocessing is damaged ({where}: {first['msg']})") from error
    if isinstance(made, Images) and not len(made.mean) == len(made.deviation) in (1, 3):
        raise ValueError("its preprocessing is damaged (mean, deviation: should be of 1 or 3)")
    return made


def images_of(folder: Path, *, key: str) -> Preprocessing:
    """Return the preprocessing in a folder's processor files (transformers).

    Raises ValueError if there is none, or it makes no images of one size.
    """
    about: dict[str, Any] = {}
    for name in PROCESSORS:
        if (folder / name).is_file():
            found = read_json(folder / name)
            about = found.get("image_processor", found) if isinstance(found, dict) else {}
            break
    if not about:
        raise ValueError(
            f"{key} = {folder}: has no {PROCESSORS[0]}, which states size, mean and deviation of "
            "its images; copy it from the encoder's origin"
        )
    where = f"{key} = {folder}: {name}"
    try:
        size, crop = about.get("size") or {}, about.get("crop_size")
        cropped = _sides(crop) if crop and about.get("do_center_crop") else None
        shorter = size.get("shortest_edge") if isinstance(size, dict) else None
        if isinstance(size, int) and cropped:
            shorter = size
        if shorter and (share := about.get("crop_pct")) and not cropped:  # ConvNeXT
            cropped = (shorter, shorter)
            shorter = int(shorter / share) if shorter < 384 else None
        height, width = cropped or _sides(shorter or size)
        normal = about.get("do_normalize", True)
        mean = about["image_mean"] if normal else (0.0, 0.0, 0.0)
        deviation = about["image_std"] if normal else (1.0, 1.0, 1.0)
        scale = about.get("rescale_factor", 1 / PIXEL_SCALE) * PIXEL_SCALE
        if not about.get("do_rescale", True):
            scale = PIXEL_SCALE
        values = {
            "height": height,
            "width": width,
            "mean": [one / scale for one in mean],
            "deviation": [one / scale for one in deviation],
            "resize": "crop" if shorter else "stretch",
            "shorter": shorter or 0,
            "interpolation": Image.Resampling(about.get("resample", 2)).name.lower(),
        }
        return from_json({"kind": "image", **values})
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{where} is not understood ({error})") from error


def _sides(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size in a processor file."""
    if isinstance(size, int):
        return size, size
    side = size.get("shortest_edge")
    return (side, side) if side else (size["height"], size["width"])


def tokens_of(folder: Path, config: Mapping[str, Any], *, key: str) -> Tokens:
    """Return lengths and pooling of a text encoder, from sentence-transformers' files if any.

    Raises ValueError for a part that is not supported.
    """
    length = int(config.get("max_position_embeddings") or MOST_TOKENS)
    if config.get("model_type") in ("roberta", "xlm-roberta", "camembert"):
        length -= 2  # their positions begin behind the padding token
    made = Tokens(min(length, MOST_TOKENS), padding=int(config.get("pad_token_id") or 0))
    if (folder / "sentence_bert_config.json").is_file():
        stated = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
        made = replace(made, length=min(length, int(stated or made.length)))
    if not (folder / "modules.json").is_file():
        return made
    for module in read_json(folder / "modules.json"):
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Normalize":
            made = replace(made, normalise=True)
        elif kind == "Pooling":
            about = read_json(folder / Path(module["path"]).name / "config.json")
            asked = [
                name
                for name in (*POOLINGS, "mean_sqrt_len", "weightedmean")
                if about.get(f"pooling_mode_{name}_tokens")
                or about.get(f"pooling_mode_{name}_token")
                or about.get(f"pooling_mode_{name}")
            ] or [about.get("pooling_mode")]
            if len(asked) != 1 or asked[0] not in POOLINGS:
                raise ValueError(f"{key} = {folder}: pools by {asked}; should be one of {POOLINGS}")
            made = replace(made, pooling=str(asked[0]))
        elif kind != "Transformer":
            raise ValueError(f"{key} = {folder}: its part {kind} is not supported")
    return made
