"""How new weights get to servers, and how it is known that they arrived."""

from __future__ import annotations

import base64
import hashlib
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_dmd.engines.sglang.client import Client
from miles_dmd.errors import EngineError, EngineRefused

MODULE = "transformer"
BUCKET_BYTES = 256 << 20


class Transport(Protocol):
    def send(self, bucket: Mapping[str, Tensor]) -> None: ...

    def finish(self) -> None: ...


class InRequests:
    """Each bucket is a request's body: what a server on a CPU takes, whose unpickler admits tensors and little else."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        payload = base64.b64encode(pickle.dumps([(name, value) for name, value in bucket.items()])).decode()
        body = {"serialized_named_tensors": [payload], "target_modules": [MODULE]}
        on_all(self.clients, lambda client: succeed(client, "/update_weights_from_tensor", body))

    def finish(self) -> None: ...


class ThroughFolder:
    """All buckets are written to a folder that the servers can read, and they are told to load it."""

    def __init__(self, clients: Sequence[Client], folder: Path) -> None:
        self.clients, self.folder, self.parts = clients, folder, 0
        shutil.rmtree(folder, ignore_errors=True)
        (folder / MODULE).mkdir(parents=True)

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        self.parts += 1
        contiguous = {name: value.contiguous() for name, value in bucket.items()}
        save_file(contiguous, self.folder / MODULE / f"part-{self.parts:05}.safetensors")

    def finish(self) -> None:
        body = {"model_path": str(self.folder.resolve()), "flush_cache": True, "target_modules": [MODULE]}
        on_all(self.clients, lambda client: succeed(client, "/update_weights_from_disk", body))


def on_all(clients: Sequence[Client], call: Callable[[Client], Any]) -> None:
    """At once; returns when all are done. Raises the first failure in the order of ``clients``."""
    if len(clients) == 1:
        call(clients[0])
        return
    with ThreadPoolExecutor(len(clients)) as threads:
        for done in [threads.submit(call, client) for client in clients]:
            done.result()


def succeed(client: Client, path: str, body: Mapping[str, Any]) -> None:
    """POST; the answer must say success."""
    answer = client.post(path, body)
    if answer.get("success") is not True:
        raise EngineRefused(f"{client.url}{path}: {answer.get('message', 'no success, and no reason')}")


def cast(bucket: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """As the server holds them: half the bytes where it computes in bf16, and the same bytes to compare."""
    return {name: value.detach().to(dtype_of(name)).contiguous() for name, value in bucket.items()}


def digest(value: Tensor) -> str:
    """SHA-256 as the server's /update_weights_from_tensor_checker computes it."""
    hasher = hashlib.sha256(str(value.dtype).encode())
    hasher.update(repr(tuple(value.shape)).encode())
    hasher.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def compare(client: Client, digests: Mapping[str, str]) -> None:
    """Raises EngineError unless the server holds exactly these tensors."""
    body = {"target_module": MODULE, "expected_named_tensors_sha256": dict(digests)}
    try:
        succeed(client, "/update_weights_from_tensor_checker", body)
    except EngineRefused as error:
        raise EngineError(f"{client.url} does not hold the weights that it was sent: {_reason(error)}") from error


def _reason(error: EngineRefused) -> str:
    return str(error).partition("; asked:")[0].partition("status 400: ")[2] or str(error)


def checkpoint_buckets(component: Path) -> Iterator[dict[str, Tensor]]:
    """What a pipeline directory stores of its network, a bucket in memory at a time."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for path in sorted(path for path in component.glob("*.safetensors") if ".fp16." not in path.name):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                value = file.get_tensor(name)
                if bucket and size + value.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = {}, 0
                bucket[name], size = value, size + value.nbytes
    yield bucket
