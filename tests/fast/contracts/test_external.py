"""External data is about these samples, of this policy, or it is refused."""

import pytest
import torch

from miles_dmd.contracts.external import ExternalData
from miles_dmd.errors import ExternalDataError


def scores(ids=(1, 2, 3), version=4, **tensors):
    tensors = tensors or {"clean": torch.tensor([[float(i)] for i in ids])}
    return ExternalData("critic", tuple(ids), version, tensors)


def test_rows_are_found_by_sample_id_whatever_the_order():
    found = scores().require(("clean",), (3, 1), 4)

    assert found.ids == (3, 1)
    assert found.tensors["clean"].tolist() == [[3.0], [1.0]]


@pytest.mark.parametrize(
    ("keys", "ids", "version", "message"),
    [
        (("normaliser",), (1,), 4, r"without \['normaliser'\]"),
        (("clean",), (1, 9), 4, r"did not score samples \[9\]"),
        (("clean",), (1,), 5, "policy version 4; the batch is of version 5"),
    ],
)
def test_wrong_data_is_refused(keys, ids, version, message):
    with pytest.raises(ExternalDataError, match=message):
        scores().require(keys, ids, version)


def test_ranks_are_joined_in_order():
    joined = ExternalData.join([scores((1, 2)), scores((3, 4))])

    assert joined.ids == (1, 2, 3, 4)
    assert joined.tensors["clean"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (scores((3, 4), version=5), "different producers or policy versions"),
        (scores((3, 4), noise=torch.zeros(2, 1)), "different keys"),
        (scores((2, 3)), "scored a sample twice"),
        (scores((3, 4), clean=torch.zeros(2, 3)), r"of 'clean' of different shapes, \[1\] and \[3\]; pad them"),
        (scores((3, 4), clean=torch.zeros(2)), r"of 'clean' of different shapes, \[\] and \[1\]"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(other, message):
    with pytest.raises(ExternalDataError, match=message):
        ExternalData.join([scores((1, 2)), other])


@pytest.mark.parametrize("value", [torch.tensor(1.0), 1.0, None, [[1.0], [2.0]]])
def test_what_has_no_row_a_sample_is_refused(value):
    with pytest.raises(ExternalDataError, match="hands no row a sample of 'clean'"):
        scores((1, 2), clean=value)


def test_rows_must_match_the_samples():
    with pytest.raises(ExternalDataError, match="2 rows of 'clean' for 3 samples"):
        scores((1, 2, 3), clean=torch.zeros(2, 1))
