"""FSDP2 sharding, block by block, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_dmd.training.compute import Compute


def group_mesh(compute: Compute) -> DeviceMesh:
    """A one-dimensional mesh over the process group of this trainer group, which must be initialised."""
    return dist.device_mesh.init_device_mesh(compute.device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))


def shard(network: nn.Module, blocks: Sequence[str], mesh: DeviceMesh, compute_dtype: torch.dtype) -> nn.Module:
    """Shard ``network``, which is on the CPU, in place: every block of a class named in ``blocks``, then the rest.

    Without ``blocks`` it is sharded as a whole. Raises ValueError for names that no block has.

    Each goes to the mesh's device as it is sharded, so that a whole network never has to fit there. Parameters stay
    fp32, gradients are reduced in fp32. Inputs are cast by ``Denoiser``, not here: FSDP would round the timestep to
    bf16 too. Never toggle requires_grad afterwards: FSDP2 fixes its dtypes at the first forward, from the parameters
    that require a gradient at that time.

    One rank that computes in fp32 has nothing to gather and nothing to cast, so its network stays as it is: FSDP2 would
    copy every parameter at each use.
    """
    found = [module for module in network.modules() if type(module).__name__ in blocks]
    if blocks and not found:
        raise ValueError(f"{type(network).__name__} has no block of a class among {list(blocks)} to shard")
    if mesh.size() == 1 and compute_dtype == torch.float32:
        return network.to(mesh.device_type)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in (*found, network):
        # also the root: a scoring pass would otherwise leave its parameters gathered until the next backward
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return network


def local(value: Tensor) -> Tensor:
    """This rank's part of ``value``, sharing its memory; ``value`` itself where it is no DTensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(sharded: Tensor, part: Tensor) -> Tensor:
    """``part``, this rank's, as the DTensor that ``sharded`` is, sharing memory; the inverse of ``local``."""
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,  # of shards that are not even, it does not follow from the local one
        stride=sharded.stride(),
    )
