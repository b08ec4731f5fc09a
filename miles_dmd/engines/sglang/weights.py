"""Weight transport to SGLang servers, and its verification."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import heapq
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_dmd.engines.sglang.client import Client, Patience
from miles_dmd.errors import EngineError, EngineRefused

MODULE = "transformer"
BUCKET_BYTES = 256 << 20


SAMPLED = 16
"""Tensors of an update that are compared where not all of them are."""


class Transport(Protocol):
    path: str
    """Of the request by which a server takes weights."""
    requests: int
    """Of those, how many each server has had to take so far."""

    def send(self, bucket: Mapping[str, Tensor]) -> None: ...

    def finish(self) -> None: ...


class Each(Protocol):
    """Calls for every server that takes the update, at once."""

    def __call__(self, call: Callable[[Client], Any]) -> None: ...


class InRequests:
    """Each bucket is a request's body: what a server on a CPU takes, whose unpickler admits tensors and little else."""

    path = "/update_weights_from_tensor"

    def __init__(self, each: Each) -> None:
        self.each, self.requests = each, 0

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        payload = base64.b64encode(pickle.dumps([(name, value) for name, value in bucket.items()])).decode()
        body = {"serialized_named_tensors": [payload], "target_modules": [MODULE]}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1

    def finish(self) -> None: ...


class ThroughFolder:
    """All buckets are written to an empty folder that the servers can read, and they are told to load it."""

    path = "/update_weights_from_disk"

    def __init__(self, each: Each, folder: Path) -> None:
        self.each, self.folder, self.parts, self.requests = each, folder, 0, 0
        (folder / MODULE).mkdir()

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        self.parts += 1
        contiguous = {name: value.contiguous() for name, value in bucket.items()}
        save_file(contiguous, self.folder / MODULE / f"part-{self.parts:05}.safetensors")

    def finish(self) -> None:
        body = {"model_path": str(self.folder.resolve()), "flush_cache": True, "target_modules": [MODULE]}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1


def cast(bucket: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """As the server holds them: half the bytes where it computes in bf16, and the same bytes to compare."""
    return {name: value.detach().to(dtype_of(name)).contiguous() for name, value in bucket.items()}


def digest(value: Tensor) -> str:
    """SHA-256 as the server's /update_weights_from_tensor_checker computes it."""
    hasher = hashlib.sha256(str(value.dtype).encode())
    hasher.update(repr(tuple(value.shape)).encode())
    hasher.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def sampled(names: Iterable[str], version: int) -> frozenset[str]:
    """The tensors of an update that are compared where not all of them are: others for each version."""
    draw = {name: hashlib.blake2b(f"{version} {name}".encode()).digest() for name in names}
    return frozenset(heapq.nsmallest(SAMPLED, draw, key=lambda name: draw[name]))


def compare(client: Client, digests: Mapping[str, str], module: str = MODULE) -> None:
    """Raises EngineError unless the server holds exactly these tensors."""
    body = {"target_module": module, "expected_named_tensors_sha256": dict(digests)}
    try:
        client.succeed("/update_weights_from_tensor_checker", body)
    except EngineRefused as error:
        raise EngineError(f"{client.url} does not hold the weights that it was sent: {_reason(error)}") from error


def _reason(error: EngineRefused) -> str:
    return str(error).partition("; asked:")[0].partition("status 400: ")[2] or str(error)


def checksum(client: Client, *, patience: Patience | None = None) -> str:
    """Of the names and bytes of all parameters of the server's network."""
    return str(client.post("/get_weights_checksum", {"module_names": [MODULE]}, patience=patience).get(MODULE))


def checkpoint_checksum(component: Path, dtype_of: Callable[[str], torch.dtype]) -> str:
    """What ``checksum`` is at a server that holds exactly what a pipeline directory stores of its network."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(str(path), "pt")) for path in _files(component)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        hasher = hashlib.sha256()
        for name in sorted(where):
            hasher.update(name.encode())
            value = where[name].get_tensor(name).to(dtype_of(name)).contiguous()
            hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def stored_shapes(component: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of what a pipeline directory stores of its network."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(component):
        with safe_open(str(path), "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _files(component: Path) -> list[Path]:
    return sorted(path for path in component.glob("*.safetensors") if ".fp16." not in path.name)


def checkpoint_buckets(component: Path) -> Iterator[dict[str, Tensor]]:
    """What a pipeline directory stores of its network, a bucket in memory at a time."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for path in _files(component):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                value = file.get_tensor(name)
                if bucket and size + value.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = {}, 0
                bucket[name], size = value, size + value.nbytes
    yield bucket
