"""The language plugin in stand-ins of the server's objects: seeds of requests, hashes of seeds, SHA-256 of weights."""

import hashlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "sglang_plugin"))

from miles_dmd_sglang.kernels import murmur_hash32
from miles_dmd_sglang.language import around_batch, sha256

WORD = 0xFFFFFFFF


def exact_hash(seed, position, column):
    """MurmurHash3 of four words of 32 bits, in whole numbers."""

    def rotate(value, by):
        return ((value << by) | (value >> (32 - by))) & WORD

    state = 0
    for word in (seed & WORD, seed >> 32 & WORD, position, column):
        state ^= rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotate(state, 13) * 5 + 0xE6546B64) & WORD
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def test_hash_is_that_of_whole_numbers():
    seeds, positions = [5, 2**62 + 7, 2**63 - 1], [0, 9, 70_000]

    found = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(5))

    expected = [[exact_hash(s, p, c) for c in range(5)] for s, p in zip(seeds, positions, strict=True)]
    assert found.tolist() == expected


@pytest.fixture
def backend(monkeypatch):
    """Sets the server's sampling backend."""

    def choose(name):
        module = ModuleType("sglang.srt.runtime_context")
        module.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend=name))
        for package in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)

    return choose


def batch_of(*seeds):
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    )


def sampled(batch, given=None):
    def original(cls, batch, vocabulary):
        return SimpleNamespace(sampling_seed=given, temperatures=torch.ones(len(batch.reqs), 1))

    return around_batch(original, object, batch, 9).sampling_seed


def test_seeds_of_requests_are_obeyed(backend):
    backend("pytorch")
    batch = batch_of(2**62 + 1, None)

    seeds = sampled(batch)

    assert seeds[0] == 2**62 + 1
    assert torch.equal(sampled(batch), seeds)  # a request without one keeps what it drew
    assert sampled(batch_of(None)) != sampled(batch_of(None))


def test_backends_that_refuse_seeds_get_none(backend):
    backend("flashinfer")

    assert sampled(batch_of(5)) is None


def test_seeds_that_the_server_has_set_stay(backend):
    backend("pytorch")

    assert sampled(batch_of(5), torch.tensor([7])).tolist() == [7]


def test_digest_is_of_the_bytes():
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T

    assert sha256(value) == hashlib.sha256(value.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
