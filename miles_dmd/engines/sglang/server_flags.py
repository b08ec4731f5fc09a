"""Flags of ``sglang serve`` that the run sets itself, which --sglang-args may not. Knows no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from miles_dmd.errors import ConfigError

OWN = (
    "--model-path", "--model-id", "--host", "--port", "--scheduler-port", "--master-port", "--strict-ports",
    "--served-model-name", "--warmup-mode", "--sleep-on-idle", "--dit-precision", "--vae-precision",
    "--text-encoder-precisions", "--die-with-stdin", "--component-paths.scheduler",
)  # fmt: skip
LANGUAGE = (
    "--model-path", "--host", "--port", "--nccl-port", "--served-model-name", "--dtype", "--skip-tokenizer-init",
    "--grammar-backend", "--skip-server-warmup", "--sleep-on-idle", "--sampling-backend", "--device",
    "--enable-memory-saver", "--die-with-stdin", "--preferred-sampling-params", "--enable-watermark",
)  # fmt: skip
"""Flags of a server of language models that the run sets itself."""
OTHER_NAMES = ("--config", "--scheduler-path", "--component-precisions", "--model-subfolder", "--pipeline-class-name")
"""Flags that would set the same."""
DEVICES = ("--tp-size", "--num-gpus", "--sp-degree", "--ulysses-degree", "--ring-degree", "--dp-size", "--dp",
           "--data-parallel-size", "--cfg-parallel-size", "--hsdp-shard-dim",
           "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size", "--ep-size", "--nnodes")  # fmt: skip
"""Flags of a server on several devices."""


def words(flags: str, own: Sequence[str] = (*OWN, *OTHER_NAMES)) -> list[str]:
    """--sglang-args as a list. Raises ConfigError for a text that is none, or that names a flag of the run's own."""
    try:
        found = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--sglang-args {flags!r} cannot be read ({error}); quote it as in a shell") from None
    for word in found:
        if word.startswith("--") and (flag := owned(word, own)):
            stands = "" if flag == _name(word) else f" (for {flag})"
            raise ConfigError(
                f"--sglang-args {word}{stands}: the run sets that itself; leave it out, or start the server yourself "
                "and name it with --sglang-url"
            )
    return found


def owned(word: str, own: Sequence[str] = (*OWN, *OTHER_NAMES)) -> str:
    """The flag of the run's own that a word stands for, also cut short, as argparse takes it; empty for another."""
    name = _name(word)
    exact = next((flag for flag in own if name == flag or name.startswith(f"{flag}.")), "")
    return exact or next((flag for flag in own if len(name) > 2 and flag.startswith(name)), "")


def require_one_device(flags: str, device: str, own: Sequence[str] = (*OWN, *OTHER_NAMES)) -> None:
    """Raises ConfigError for a server on several GPUs: one that the run starts sees that of its bundle alone."""
    for word in words(flags, own) if device != "cpu" else ():
        if word.startswith("--") and len(word) > 2 and any(flag.startswith(_name(word)) for flag in DEVICES):
            raise ConfigError(
                f"--sglang-args {word}: a server that the run starts has the device of its bundle and no other; start "
                "the server yourself and name it with --sglang-url, or pass --device cpu"
            )


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
