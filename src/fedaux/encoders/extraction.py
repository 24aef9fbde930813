"""Features of images and texts of any size, made on demand: decoded data is never all in memory."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, cycle, islice, tee
from mmap import mmap
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedaux.config import Auxiliary, Data, EncoderSection, ExperimentFields
from fedaux.core.compute import Compute
from fedaux.data import cache, notes
from fedaux.data.decoding import Content, DecodedBlock, Entry, Numbers
from fedaux.data.texts import WIDTH_STEP, text_of
from fedaux.data.vocabulary import library
from fedaux.encoders.network import Encoder, open_encoder
from fedaux.encoders.preprocessing import Images, Preprocessing, Tokens
from fedaux.files import replacing
from fedaux.formatting import megabytes

BLOCK, MOST = 32, 8192
"""Batches that are stored at a time, and rows at most (two batches may have more); an interrupted
extraction continues behind the last ones."""
GPU_BATCH, CPU_BATCH = 256, 32
"""Images of 224 pixels, or texts, per batch."""
USUAL_PIXELS = 224 * 224
WORTH_COMPILING = 30_000
"""Inputs from which compiling the network saves time."""
PEAK = 3
"""Peak memory of a run per byte of features in single precision: 2.8 were measured with 80,000 of
1,280 numbers."""
FEW = 512
"""Images up to which this process decodes them itself; more are decoded by worker processes."""
PART, PREFETCHED = 32, 4
"""Images that a worker process decodes at a time, and such parts that are ahead of each."""

Row = tuple[int, Entry]
Read = tuple[str | None, str | None]
"""A text, or None for an image; and the reason if it is unreadable."""


def extractor_of(experiment: ExperimentFields, compute: Compute) -> Extractor | None:
    """Return what makes the features of an experiment; None without an encoder.

    Raises ValueError if the encoder cannot be used or reads another kind of data.
    """
    section = experiment.encoder
    if section is None:
        return None
    encoder = open_encoder(section)
    if encoder.reads_texts != (experiment.text is not None):
        kinds = "texts; add" if encoder.reads_texts else "images; leave out"
        raise ValueError(f"encoder.source = {section.source!r}: reads {kinds} the table [text]")
    return Extractor(encoder, compute, batch_size=section.batch_size)


class Extractor:
    """Makes features, float16 [n, F], of the entries of a table; a converter for
    `fedaux.data.read`."""

    def __init__(
        self, encoder: Encoder, compute: Compute, *, batch_size: int | None = None
    ) -> None:
        self.encoder = encoder
        self.reads_texts = encoder.reads_texts
        self._compute = compute
        self._module: nn.Module | None = None
        self.batch_size = batch_size or self._usual_batch()
        inputs = encoder.inputs
        if isinstance(inputs, Images):
            self._mean, self._deviation = (
                torch.tensor(numbers, device=compute.device)[:, None, None]
                for numbers in (inputs.mean, inputs.deviation)
            )
        self._tokenizer = _tokenizer(encoder)

    def settings(self, section: Data | Auxiliary) -> dict[str, object]:
        """Return everything besides the files that features depend on."""
        compute = self._compute
        return {
            "encoder": self.encoder.digest,
            "alone": self.batch_size == 1,
            "device": compute.device.type,
            "precision": str(compute.precision),
            "encoding": section.encoding,
            "column": [section.image_column, *section.text_column],
        }

    def finished(self, numbers: Numbers) -> Numbers:
        """Return stored features as they are used, in single precision."""
        return numbers.astype(np.float32)  # type: ignore[return-value]

    def nothing(self) -> Numbers:
        """Return no features [0, F]."""
        return np.zeros((0, self.encoder.width), dtype=np.float32)  # type: ignore[return-value]

    def encode_all(
        self,
        entries: Iterator[Entry],
        *,
        bad_labels: Mapping[int, str],
        encoding: str | None = None,
        place: str | None = None,
        expected: int = 0,
    ) -> Iterator[DecodedBlock]:
        """Yield the rows in order, in blocks. Blocks of an interrupted extraction are reused:
        `place` is its name in the cache."""
        self._check_room(expected)
        self._prepare(expected)
        folder, numbered, number = _unfinished(place), enumerate(entries), 0
        while (stored := _stored(folder, number)) is not None:
            yield stored
            number, past = number + 1, len(stored.rows) + len(stored.reasons)
            next(islice(numbered, past, past), None)
        ahead, rest = tee(numbered)
        few = self.reads_texts or expected <= FEW or current_process().daemon  # starts no child
        workers = 0 if few else os.cpu_count() or 1
        size = self.batch_size if self.batch_size > 1 else self._compute.workers
        batches = 1 + math.ceil(PART * (2 + PREFETCHED * workers) / size)
        reading = Reading(self.encoder.inputs, bad_labels, encoding=encoding, slots=batches * size)
        loader = DataLoader(
            reading,
            batch_size=PART,
            sampler=zip(cycle(range(batches * size)), ahead, strict=False),
            collate_fn=list,
            num_workers=workers,
            prefetch_factor=PREFETCHED if workers else None,
            multiprocessing_context="fork" if workers else None,  # they share the slots
        )
        read = chain.from_iterable(loader)
        pixels = cycle(reading.pixels.split(size))
        while rows := list(islice(rest, size * max(2, min(BLOCK, MOST // size)))):
            found = self._block(rows, read, pixels, size=size)
            _store(folder, number, found)
            number += 1
            yield found
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def features(self, contents: Sequence[Content]) -> Tensor:
        """Return the features [n, F] of some inputs. Raises ValueError if one is unreadable."""
        rows = ((str(place), one) for place, one in enumerate(contents))
        blocks = list(self.encode_all(rows, bad_labels={}, expected=len(contents)))
        for reason in chain.from_iterable(block.reasons.values() for block in blocks):
            raise ValueError(reason)
        return torch.from_numpy(np.concatenate([one.images for one in blocks]).astype(np.float32))

    def _check_room(self, inputs: int) -> None:
        """Raise ValueError if features fit neither on the disk nor into memory."""
        size = 4 * self.encoder.width * inputs  # on disk 2 bytes a number, as blocks and as a file
        folder = cache.folder() or Path(tempfile.gettempdir())
        disk = next(place for place in (folder, *folder.parents) if place.exists())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for wanted, room, where in (
            (size, shutil.disk_usage(disk).free, f"on the disk of {folder} (FEDAUX_CACHE)"),
            (PEAK * size, memory, "in memory"),
        ):
            if wanted > room:
                raise ValueError(
                    f"{self.encoder.source}: features of {inputs:,} inputs need "
                    f"{megabytes(wanted)} MB {where}, which has {megabytes(room)} MB; reduce "
                    "data.size or auxiliary.size"
                )

    def _usual_batch(self) -> int:
        size = GPU_BATCH if self._compute.device.type == "cuda" else CPU_BATCH
        if isinstance(inputs := self.encoder.inputs, Images):
            size = round(size * USUAL_PIXELS / (inputs.height * inputs.width))
        return max(1, min(size, 4 * GPU_BATCH))

    def _prepare(self, expected: int) -> None:
        if self._module is not None:
            return
        module = self.encoder.module
        if self._compute.device.type != "cpu":
            module = copy.deepcopy(module).to(self._compute.device)
        if self._compute.device.type == "cuda" and not self.reads_texts:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if self._compute.compile and expected >= WORTH_COMPILING:
                module.compile()
        self._module = module

    def _block(
        self, rows: Sequence[Row], read: Iterator[Read], pixels: Iterator[Tensor], *, size: int
    ) -> DecodedBlock:
        """Return the features of some rows; `pixels` yields the slots of each batch of images."""
        found = np.zeros((len(rows), self.encoder.width), dtype=np.float16)
        reasons: dict[int, str] = {}
        texts: dict[int, str] = {}
        with np.errstate(over="ignore"):
            for start in range(0, len(rows), size):
                for place, (row, _) in enumerate(rows[start : start + size], start):
                    text, reason = next(read)
                    if reason is not None:
                        reasons[row] = reason
                    elif text is not None:
                        texts[place] = text
                if not self.reads_texts:
                    features = self._halving(next(pixels))  # always a full batch
                    found[start : start + size] = features[: len(rows) - start].numpy()
            self._of_texts(texts, found)
        for place, (row, (where, _)) in enumerate(rows):
            if row not in reasons and not np.isfinite(found[place]).all():
                reasons[row] = f"{where}: its features are not finite"
        good = [place for place, (row, _) in enumerate(rows) if row not in reasons]
        ordered = dict(sorted(reasons.items()))
        return DecodedBlock(found[good], [rows[place][0] for place in good], ordered)

    def _of_texts(self, texts: Mapping[int, str], found: NDArray[np.float16]) -> None:
        """Fill in the features of texts, in batches of similar lengths."""
        if not isinstance(inputs := self.encoder.inputs, Tokens):
            return
        encoded = self._tokenizer.encode_batch(list(texts.values()))
        ids = dict(zip(texts, (one.ids for one in encoded), strict=True))
        order = sorted(texts, key=lambda place: len(ids[place]))
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            width = -(-max(len(ids[place]) for place in places) // WIDTH_STEP) * WIDTH_STEP
            batch = torch.full((len(places), min(width, inputs.length)), inputs.padding)
            for row, place in enumerate(places):
                batch[row, : len(ids[place])] = torch.tensor(ids[place])
            found[places] = self._halving(batch).numpy()

    def _halving(self, pixels: Tensor) -> Tensor:
        """Return features [N, F]; batches that do not fit into memory are halved, and one line
        says so. In batches of one, each is computed on one thread, as if it were alone."""

        def alone(rows: Sequence[int]) -> Tensor:
            return torch.cat([self._run(pixels[row : row + 1]) for row in rows])

        while True:
            try:
                if self.batch_size == 1:
                    return torch.cat(self._compute.spread_alone(alone, range(len(pixels))))
                parts = [self._run(part) for part in pixels.split(self.batch_size)]
                # Copying on many threads would wait for the worker processes.
                return parts[0] if len(parts) == 1 else torch.cat(parts)
            except torch.cuda.OutOfMemoryError as error:
                if self.batch_size == 1:
                    raise ValueError(
                        f"{self.encoder.source}: a single image does not fit into the memory of "
                        "the GPU; use engine.device = 'cpu', or a smaller encoder.image_size"
                    ) from error
            torch.cuda.empty_cache()
            self.batch_size = max(1, self.batch_size // 2)
            notes.say(
                f"{self.encoder.source}: out of GPU memory; the batch is now {self.batch_size}"
            )

    @torch.inference_mode()
    def _run(self, inputs: Tensor) -> Tensor:
        assert self._module is not None, "prepared before"
        compute = self._compute
        placed = inputs.to(compute.device, non_blocking=True)
        if isinstance(self.encoder.inputs, Images):
            placed = (placed.float().div_(255.0) - self._mean) / self._deviation
            if compute.device.type == "cuda":
                placed = placed.contiguous(memory_format=torch.channels_last)
        with compute.autocast():
            return self._module(placed).float().cpu()  # type: ignore[no-any-return]


class Reading(Dataset[Any]):
    """Reads rows: the data set of a DataLoader whose sampler yields slots and rows, not numbers.

    Images are written to slots of memory that worker processes share; it is not in /dev/shm, which
    is small in containers.
    """

    def __init__(
        self, inputs: Preprocessing, bad: Mapping[int, str], *, encoding: str | None, slots: int
    ) -> None:
        self._inputs, self._bad, self._encoding = inputs, bad, encoding
        shape = (slots, *inputs.shape) if isinstance(inputs, Images) else (1,)
        self.pixels = torch.frombuffer(mmap(-1, math.prod(shape)), dtype=torch.uint8).view(shape)

    def __getitem__(self, place: tuple[int, Row]) -> Read:
        slot, (number, (where, content)) = place
        try:
            if number in self._bad:
                raise ValueError(self._bad[number])
            if isinstance(self._inputs, Tokens):
                return text_of(content, encoding=self._encoding), None
            self.pixels.numpy()[slot] = self._inputs.pixels(content)
        except ValueError as error:
            return None, f"{where}: {error}"
        return None, None


def _tokenizer(encoder: Encoder) -> Any:
    """Return the tokenizer of an encoder of texts; None for images."""
    if not isinstance(inputs := encoder.inputs, Tokens):
        return None
    tokenizers = library()
    if encoder.tokenizer is None:
        raise ValueError(f"{encoder.source}: has no tokenizer")
    made = tokenizers.Tokenizer.from_str(encoder.tokenizer)
    made.enable_truncation(inputs.length)
    made.no_padding()
    return made


def encoder_named(source: str) -> Encoder:
    """Return an encoder as the command line names it: also a folder without `hf:`."""
    if Path(source).is_dir():
        source = f"hf:{source}"
    return open_encoder(EncoderSection(source=source), key="NAME_OR_FOLDER")


def described(encoder: Encoder, compute: Compute) -> list[tuple[str, str]]:
    """Return what an encoder is, line by line, with its measured speed on this device."""
    about, inputs = encoder.about, encoder.inputs
    network = about.get("config", {}).get("model_type") or about.get("library") or "a module"
    extractor = Extractor(encoder, compute)
    if isinstance(inputs, Images):
        pixels = np.zeros((inputs.shape[0], 2 * inputs.height, 2 * inputs.width), dtype=np.uint8)
        number = 4 * GPU_BATCH if compute.device.type == "cuda" else CPU_BATCH
        examples: list[Content] = [pixels] * number
    else:
        examples = ["a sentence with eight words in it, here"] * 64
    extractor.features(examples[: extractor.batch_size])
    began = time.monotonic()
    extractor.features(examples)
    speed = len(examples) / (time.monotonic() - began)
    kind = "texts" if encoder.reads_texts else "images"
    return [
        ("source", encoder.source),
        ("licence", encoder.licence or "not stated"),
        ("network", f"{network}, {encoder.parameters / 1e6:.1f} million weights"),
        ("inputs", str(inputs)),
        ("features", str(encoder.width)),
        ("speed", f"{speed:.0f} {kind} per second on {compute.device.type}"),
        ("digest", encoder.digest),
    ]


def token_ids(encoder: Encoder, texts: Sequence[str]) -> Tensor:
    """Return the token ids of texts, padded to the encoder's length [N, L]."""
    inputs = encoder.inputs
    assert isinstance(inputs, Tokens)
    ids = torch.full((len(texts), inputs.length), inputs.padding)
    for row, found in enumerate(_tokenizer(encoder).encode_batch(list(texts))):
        ids[row, : len(found.ids)] = torch.tensor(found.ids)
    return ids


def _unfinished(place: str | None) -> Path | None:
    """Return the folder of an extraction's finished blocks; None if the cache cannot hold them."""
    parent = cache.folder()
    if parent is None or place is None:
        return None
    try:
        (parent / f"unfinished-{place}").mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return parent / f"unfinished-{place}"


def _stored(folder: Path | None, number: int) -> DecodedBlock | None:
    if folder is None:
        return None
    try:
        with np.load(folder / f"{number:06d}.npz", allow_pickle=False) as held:
            reasons = json.loads(str(held["reasons"]))
            return DecodedBlock(
                held["features"], held["rows"].tolist(), {int(row): why for row, why in reasons}
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # missing, or torn by a crash: made again


def _store(folder: Path | None, number: int, block: DecodedBlock) -> None:
    if folder is None:
        return
    file, reasons = folder / f"{number:06d}.npz", json.dumps(list(block.reasons.items()))
    with suppress(OSError), replacing(file) as temporary, temporary.open("wb") as stream:
        np.savez(stream, features=block.images, rows=np.array(block.rows), reasons=reasons)
