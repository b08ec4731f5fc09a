"""Export of a student's network: rounded to a dtype, in safetensors files, whole or not at all."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.errors import SaveError
from miles_dmd.files import remove_tree, replace_directory
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.training.buckets import BUCKET_BYTES, pack
from miles_dmd.training.rounding import Asked, rounded

SHARD_SIZE: int | str = "5GB"
"""Most of one weight file; larger networks are written in several, with an index."""


def write_student(directory: Path, write: Callable[[Path], ExportReport]) -> ExportReport:
    """Have ``write`` fill a directory that appears as ``directory``, whole or not at all. Raises SaveError."""
    partial = directory.with_name(directory.name + ".partial")
    try:
        remove_tree(partial)
        partial.mkdir(parents=True)
        report = write(partial)
        replace_directory(partial, directory)  # a run that goes on has left a student there before
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # what fills the disk may be a half of it
            remove_tree(partial)
        raise SaveError(f"the student could not be written to {directory}: {_reason(error)}") from error
    return report


def write_network(
    target: Path, source: Path, buckets: Iterable[Mapping[str, Tensor]], dtype: Asked, pattern: str
) -> ExportReport:
    """Write the weights of ``buckets``, in fp32, rounded to ``dtype``, into files named by ``pattern`` in ``target``.

    What is no parameter (tables) comes from ``source``, the directory from which the student's network started, and so
    does its config.json.
    """
    target.mkdir(exist_ok=True)
    shutil.copyfile(source / "config.json", target / "config.json")
    stored = LazyTensors(weight_files(source))
    average = {name: value for bucket in buckets for name, value in bucket.items()}
    weights, report = rounded(average, stored, dtype)
    for name in stored.keys() - weights.keys():
        weights[name] = stored[name]
    save_torch_state_dict(weights, target, filename_pattern=pattern, max_shard_size=SHARD_SIZE)
    mode = (target / "config.json").stat().st_mode & 0o777
    for path in target.glob("*.safetensors"):
        path.chmod(mode)  # safetensors writes for the owner alone, whatever the umask allows
    return report


def exported_buckets(component: Path, buffers: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """The parameters of an exported network in fp32, a bucket in memory at a time; its file holds ``buffers`` too."""
    stored = LazyTensors(weight_files(component))
    for names in pack({name: 4 * stored.numel(name) for name in stored if name not in buffers}, BUCKET_BYTES):
        yield {name: stored[name].float() for name in names}


def _reason(error: Exception) -> str:
    """Reason alone; safetensors says it with the operation in front."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of one or more safetensors files, each read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [safe_open(str(path), "pt") for path in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def numel(self, name: str) -> int:
        """Its elements; nothing but the file's header is read."""
        return math.prod(self._where[name].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
