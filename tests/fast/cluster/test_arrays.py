"""Parts of a tensor that travel between processes."""

import pytest
import torch
from ray import cloudpickle

from miles_dmd.cluster.arrays import flat, unflat

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "half": torch.randn(3, 2).to(torch.bfloat16),
    "indices": torch.tensor([[1], [2]]),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("value", TENSORS.values(), ids=TENSORS.keys())
def test_arrives_as_it_was_sent(value):
    found = unflat(cloudpickle.loads(cloudpickle.dumps(flat(value))))

    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found, value)
    assert not found.requires_grad


def test_travels_out_of_band():
    buffers = []
    inside = cloudpickle.dumps(flat(torch.zeros(10_000)), protocol=5, buffer_callback=buffers.append)

    assert len(inside) < 1_000
    assert [buffer.raw().nbytes for buffer in buffers] == [40_000]
