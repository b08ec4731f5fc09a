"""Names are packed in order, up to a limit, and what is larger than that travels alone."""

import pytest

from miles_dmd.training.buckets import pack


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, []),
        ({"a": 0}, [["a"]]),
        ({"a": 4, "b": 6, "c": 1}, [["a", "b"], ["c"]]),
        ({"a": 1, "large": 11, "b": 1, "c": 1}, [["a"], ["large"], ["b", "c"]]),
        ({"large": 11, "empty": 0}, [["large"], ["empty"]]),
    ],
)
def test_no_bucket_of_several_is_above_the_limit(sizes, expected):
    assert pack(sizes, 10) == expected
