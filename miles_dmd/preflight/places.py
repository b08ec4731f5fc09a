"""Preflight of places: output directories, device, Ray address."""

import ctypes
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from miles_dmd.config.args import Args
from miles_dmd.errors import ConfigError
from miles_dmd.inputs import unwritable
from miles_dmd.preflight.resolved import ResolvedRun

INTERFACES = "GLOO_SOCKET_IFNAME"
OWN_RUNS = "runs"
"""Directory of runs without --save."""


def check_places(run: ResolvedRun) -> None:
    """Raises ConfigError for a folder that could not be made or written to; it makes none."""
    args = run.args
    save = f"--save {args.save}" if args.save is not None else f"without --save a run is kept in ./{OWN_RUNS}, and"
    _require_writable(save, lambda: Path(args.save or OWN_RUNS))
    _require_writable(f"--cache-dir {args.cache_dir}", lambda: Path(args.cache_dir))


def _require_writable(asked: str, folder: Callable[[], Path]) -> None:
    try:
        why = unwritable(folder())
    except ConfigError as error:
        cause = error.__cause__
        why = str(cause.strerror if isinstance(cause, OSError) else error)  # the path is said already
    if why:
        raise ConfigError(f"{asked}: {why}; name a directory that can be written to")


def check_device(run: ResolvedRun) -> None:
    """Raises ConfigError where --device cuda would find none, which torch takes half a minute to say, and where there
    are some, and fewer than ranks, which Ray is started for to say."""
    args = run.args
    elsewhere = args.ray_address is not None or "ray" in sys.modules  # on a cluster's nodes, not here
    if args.dry_run or args.device == "cpu" or (elsewhere and not args.local):
        return
    here, wanted = cuda_devices(), 1 if args.local else max(own.num_trainer_ranks for own in run.trainers.values())
    if here == 0 and args.device == "cuda":
        raise ConfigError("--device cuda: this machine shows no CUDA device; pass --device auto or cpu")
    if here is not None and 0 < here < wanted:
        raise ConfigError(
            f"--device {args.device}: the run wants {wanted} GPUs (one a rank) and this machine has {here}; pass fewer "
            "--num-trainer-ranks, --ray-address for a cluster that has more, or --device cpu"
        )


def check_interfaces(run: ResolvedRun) -> None:
    """Raises ConfigError for a network interface that this machine has not, where the processes of the run are here."""
    args = run.args
    here = args.ray_address is None and "ray" not in sys.modules
    if here and args.device != "cuda" and (missing := missing_interface(on_cpu=args.device == "cpu")):
        raise ConfigError(missing)


def missing_interface(*, on_cpu: bool = False) -> str:
    """GLOO_SOCKET_IFNAME where it names none of this machine's, and the cure; else "". Whoever computes on the CPU
    reads it, also where there is one rank, and gloo's error names the interface alone."""
    if not on_cpu and cuda_devices() != 0:
        return ""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(INTERFACES, "").split(",")):
        if name not in here:
            return (
                f"{INTERFACES}={name}: this machine has no such network interface; name one of {', '.join(here)}, or "
                "unset it"
            )
    return ""


def check_ray_address(run: ResolvedRun) -> None:
    """Raises ConfigError for what is no address; whether a cluster is there, a run that starts asks."""
    args = run.args
    address = args.ray_address
    if address is not None and args.ray_auth_mode != "token":
        raise ConfigError(
            f"--ray-auth-mode {args.ray_auth_mode} is about a Ray that the run starts, and --ray-address {address} "
            "joins one, which decides itself; drop one of the two"
        )
    if address is None or address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise ConfigError(f"--ray-address {address} is no address; write HOST:PORT, as `ray start --head` shows it")


def require_cluster(args: Args) -> None:
    """Raises ConfigError where nobody listens at --ray-address; a process that speaks to a cluster already keeps it."""
    joined = getattr(sys.modules.get("ray"), "is_initialized", bool)()
    if args.ray_address is not None and not joined and (reason := unheard(args.ray_address)):
        raise ConfigError(no_cluster(args.ray_address, reason))


def unheard(address: str) -> str:
    """Reason why HOST:PORT cannot be reached; empty where it can. Ray itself has a timeout of minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", which Ray looks up
        return ""
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        return str(error)
    return ""


def no_cluster(address: str, reason: str) -> str:
    return (
        f"--ray-address {address}: no Ray cluster answers there ({reason}); start one with `ray start --head`, or "
        "leave the flag out to start one on this machine"
    )


def cuda_devices() -> int | None:
    """Asks the driver itself, as torch would, without torch. None for ROCm, which torch calls cuda, too."""
    if Path("/dev/kfd").exists():
        return None
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(number)) == 0
    except (OSError, AttributeError):
        return 0
    return number.value if found else 0
