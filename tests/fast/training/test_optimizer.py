"""AdamW on local shards is AdamW on the parameters: the same norm, the same clipping, the same steps."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from miles_dmd.local import init_single_rank
from miles_dmd.training.compute import choose_compute
from miles_dmd.training.optimizer import ShardedAdamW
from miles_dmd.training.shard import group_mesh

ARGS = SimpleNamespace(lr=0.1, betas=(0.8, 0.9), adam_eps=1e-6, weight_decay=0.2)


class Block(torch.nn.Linear):
    pass


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(5, 7), Block(7, 3))


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipped", "not clipped"])
def test_steps_on_shards_equal_steps_on_whole_parameters(max_norm):
    compute = choose_compute("cpu", "fp32")
    init_single_rank(compute)
    whole, sharded = network(), fully_shard(network(), mesh=group_mesh(compute))
    reference = torch.optim.AdamW(whole.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    ours = ShardedAdamW(dict(sharded.named_parameters()), ARGS)

    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        whole(x).square().sum().backward()
        sharded(x).square().sum().backward()
        ours.collect_gradients()
        norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm), ours.clip(max_norm)
        torch.testing.assert_close(*norms)
        reference.step()
        ours.step()
        reference.zero_grad()
        ours.zero_grad()

    for (name, expected), (_, found) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert isinstance(found, DTensor), name
        torch.testing.assert_close(found.full_tensor(), expected)
        assert found.grad is None
        assert ours.shards[name].grad is None
