"""The table of a run's prompts, encoded chunk by chunk into a file, and gone on with after a kill.

    <digest>.safetensors   a whole table
    <digest>.partial       one that is being written, of its final size from the start; whoever writes it holds its lock
    <digest>.journal       CRC-32 of each chunk that the partial one holds, written once the chunk is on the disk

One chunk is in memory at a time: TEXTS_A_CHUNK rows, 42 MiB at SD3.5's size in bf16.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles_dmd.errors import ConfigError
from miles_dmd.files import digests, fsync_path
from miles_dmd.locks import leads_to, lock
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.family import DiffusionFamily, Truncation, diffusion_family
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.table_file import FORMAT, Layout, checksum, new_layout
from miles_dmd.network.pretrained import opening
from miles_dmd.observe.count import Count
from miles_dmd.pipelines.fingerprint import fingerprint, text_components
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.shown import byte_size

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.modalities.diffusion.family import Encode

TEXTS_A_CHUNK = 16
"""Encoded in one call, held in memory, and lost by a kill. Part of what a row is: encoders round by their batch."""
POLL = 0.5
"""Seconds between two looks whether another run has finished the same table."""
TOLD = 1 << 30
"""Bytes of text encoders whose reading takes so long that it is said."""
_RECORD = 9
"""Bytes of the journal for each chunk: eight hexadecimal digits and a newline."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """Ingredients of a table, whose name is a hash of them all."""

    family: DiffusionFamily
    directory: Path
    texts: tuple[str, ...]
    """The prompts, and the negative one last."""
    max_sequence_length: int
    dtype: torch.dtype
    cache_dir: Path

    @cached_property
    def path(self) -> Path:
        key = {
            "format": FORMAT,
            "family": self.family.name,
            "encoders": fingerprint(self.directory, text_components(self.family.components), digests(self.cache_dir)),
            "texts": self.texts[:-1],
            "negative_prompt": self.texts[-1],
            "max_sequence_length": self.max_sequence_length,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.cache_dir / "prompts" / f"{digest[:32]}.safetensors"

    @property
    def chunks(self) -> list[range]:
        starts = range(0, len(self.texts), TEXTS_A_CHUNK)
        return [range(start, min(start + TEXTS_A_CHUNK, len(self.texts))) for start in starts]

    def layout(self) -> tuple[bytes, Layout]:
        """The file's head and its layout, before anything is encoded; only tokenizers are opened."""
        shapes = self.family.condition_shapes(self.directory, self.max_sequence_length)
        with opening("its tokenizers", self.directory):
            cut = self.family.code().truncations(self.directory, self.texts, self.max_sequence_length)
        return new_layout(shapes, self.dtype, len(self.texts), {"truncations": [asdict(one) for one in cut]})


def ensure_table(args: Args, texts: Sequence[str], device: torch.device) -> Path:
    """The table of a run's prompts, encoded now if no earlier run with the same encoders and texts has left it.

    Says in one line, also of a table that was there, how many prompts are longer than their encoders read.
    """
    family = diffusion_family(args)
    order = Order(
        family,
        args.teacher_directory,
        (*texts, diffusion_options(args).negative_prompt),
        family.text_length(args),
        {"fp32": torch.float32, "bf16": torch.bfloat16}[args.compute_dtype],
        Path(args.cache_dir).expanduser(),
    )
    if (size := _encoder_bytes(order)) > TOLD:
        logger.info(
            "looking for this run's encoded prompts; the first time this reads %s of text encoders", byte_size(size)
        )
    table = _kept(order.path)
    if table is None:
        _encode(order, device)
        table = PromptTable(order.path)
    if told := truncated([Truncation(**one) for one in table.about["truncations"]], len(order.texts)):
        logger.warning("%s", told)
    return table.path


def _encoder_bytes(order: Order) -> int:
    """Size of the weight files that the table's name is a hash of, among others."""
    encoders = (name for name in order.family.components if name.startswith("text_encoder"))
    return sum(path.stat().st_size for name in encoders for path in weight_files(order.directory / name))


def truncated(cut: Sequence[Truncation], num_texts: int) -> str:
    """One line about texts of which an encoder does not read the end; empty where there are none."""
    if not any(one.count for one in cut):
        return ""
    parts = [
        f"{one.encoder} cuts {one.count or 'none'} at {one.limit} tokens"
        + (f" (the longest has {one.longest})" if one.count else "")
        for one in cut
    ]
    return f"of {num_texts:,} prompts, the negative one among them, {'; '.join(parts)}"


def _kept(path: Path) -> PromptTable | None:
    """A whole table that is there. A damaged one is removed: it is made again."""
    if not path.exists():
        return None
    try:
        return PromptTable(path)
    except ConfigError as error:
        logger.warning("%s; encoding the prompts again", error)
        path.unlink(missing_ok=True)
        return None


def _encode(order: Order, device: torch.device) -> None:
    """Leave the table at ``order.path``. Raises ConfigError for a disk that has no room, or that fails."""
    head, layout = order.layout()
    try:
        order.path.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(order) as file:
            if file is not None:
                _fill(order, head, layout, file, device)
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {order.cache_dir}: the encoded prompts, {byte_size(layout.size)} in all, cannot be written "
            f"({error.strerror or error}); what is encoded already is kept: make room, or name another directory"
        ) from error


@contextlib.contextmanager
def _claimed(order: Order) -> Iterator[int | None]:
    """The partial table, open, which nobody else writes meanwhile; None once another run has finished it."""
    partial, count = order.path.with_suffix(".partial"), Count("another run encodes these prompts", len(order.texts))
    while not order.path.exists():
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _locked(file) and leads_to(partial, file):
                if order.path.exists():  # finished just now: this is an empty file that was opened in between
                    partial.unlink(missing_ok=True)
                    continue
                yield file
                return
        finally:
            os.close(file)
        count.at(min(_num_records(order) * TEXTS_A_CHUNK, len(order.texts) - 1))
        time.sleep(POLL)
    yield None


def _locked(file: int) -> bool:
    try:
        return lock(file)
    except OSError as error:  # a file system without locks: two runs would write the same rows to the same places
        logger.warning("the cache cannot be locked against a second run (%s)", error.strerror)
        return True


def _num_records(order: Order) -> int:
    try:
        return order.path.with_suffix(".journal").stat().st_size // _RECORD
    except FileNotFoundError:
        return 0


def _fill(order: Order, head: bytes, layout: Layout, file: int, device: torch.device) -> None:
    """Encode what the partial table lacks, and give it its name."""
    journal_path = order.path.with_suffix(".journal")
    journal = os.open(journal_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        done = _resumed(order, head, layout, file, journal)
        _require_room(order, layout, file)
        if done < len(order.chunks):
            _encode_chunks(order, layout, file, journal, done, device)
    finally:
        os.close(journal)
    os.fsync(file)
    os.replace(order.path.with_suffix(".partial"), order.path)
    journal_path.unlink(missing_ok=True)
    fsync_path(order.path.parent)


def _resumed(order: Order, head: bytes, layout: Layout, file: int, journal: int) -> int:
    """Number of chunks that an earlier run has left whole; the journal is cut there. Anything else is begun anew."""
    done = 0
    if os.fstat(file).st_size == layout.size and os.pread(file, len(head), 0) == head:
        records = os.pread(journal, len(order.chunks) * _RECORD, 0)
        for number, rows in enumerate(order.chunks):
            record = records[number * _RECORD : (number + 1) * _RECORD]
            if record != _record(layout.checksum(file, rows)):
                break
            done = number + 1
    else:
        os.ftruncate(file, 0)
        os.ftruncate(file, layout.size)
        os.pwrite(file, head, 0)
    os.ftruncate(journal, done * _RECORD)
    return done


def _record(crc: int) -> bytes:
    return f"{crc:08x}\n".encode()


def _require_room(order: Order, layout: Layout, file: int) -> None:
    """Better before the encoders are loaded than after an hour. The file is sparse: what is not written takes none."""
    disk = os.statvfs(order.path.parent)
    lacking = layout.size - os.fstat(file).st_blocks * 512 - disk.f_bavail * disk.f_frsize
    if lacking > 0:
        raise ConfigError(
            f"--cache-dir {order.cache_dir}: the encoded prompts need {byte_size(layout.size)}, and its disk lacks "
            f"{byte_size(lacking)}; make room, or name another directory"
        )


def _encode_chunks(order: Order, layout: Layout, file: int, journal: int, done: int, device: torch.device) -> None:
    total, start = len(order.texts), min(done * TEXTS_A_CHUNK, len(order.texts))
    before = f", {start:,} of them encoded already" if start else ""
    logger.info("encoding %s prompts, %s on disk%s", f"{total:,}", byte_size(layout.size), before)
    with opening("its text encoders", order.directory):
        encode = order.family.code().open_encoder(
            order.directory, max_sequence_length=order.max_sequence_length, dtype=order.dtype, device=device
        )
    count = Count("encoding prompts", total, done=start)
    for number, rows in enumerate(order.chunks):
        if number < done:
            continue
        crc = _encode_chunk(order, layout, file, rows, encode)
        os.pwrite(journal, _record(crc), number * _RECORD)
        count.at(rows.stop)


def _encode_chunk(order: Order, layout: Layout, file: int, rows: range, encode: Encode) -> int:
    """The rows' checksum, once they are on the disk. A function of its own, so that no two chunks are in memory."""
    with opening("its text encoders", order.directory):
        encoded = encode(order.texts[rows.start : rows.stop])
    declared = {name: ((len(rows), *column.shape), column.dtype) for name, column in layout.columns.items()}
    found = {name: (tuple(value.shape), value.dtype) for name, value in encoded.items()}
    if found != declared:
        raise ConfigError(
            f"--model-family {order.family.name}: its encoder returned {found}, and its condition_shapes describe "
            f"{declared}; correct one of the two"
        )
    layout.write(file, rows.start, encoded)
    os.fdatasync(file)
    return checksum(encoded, tuple(layout.columns))
