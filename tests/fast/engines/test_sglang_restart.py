"""Servers that are restarted under a run, with their pipeline directory's weights: none gives a sample of those."""

import importlib.util
import threading
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tenacity import wait_none

from miles_dmd import client
from miles_dmd.errors import EngineError, EngineRefused

_spec = importlib.util.spec_from_file_location("fake_sglang", Path(__file__).parent / "fake_sglang.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)
FakeServer, engine_of, requests, new = fake.FakeServer, fake.engine_of, fake.requests, fake.new


@pytest.fixture
def checkpoint(tmp_path):
    """Of the fake server's network."""
    (tmp_path / "transformer").mkdir()
    save_file({"scale": torch.ones(1)}, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    return tmp_path


@pytest.fixture
def at_once(monkeypatch):
    """Repetitions do not wait."""
    monkeypatch.setattr(client, "BACKOFF", wait_none())


def server_of(kind):
    server = FakeServer(plugin=kind != "no plugin")
    server.cannot_stop = "its pipeline has a loop of its own" if kind == "cannot stop" else ""
    return server


def restart_after(samples, server, steady=None):
    """It comes back with the weights of its pipeline directory; ``steady`` answers once it has been asked again."""
    generate, lock, again, answered = server.generate, threading.Lock(), threading.Event(), []
    if samples == 0:
        server.restart()

    def generate_and_restart(body):
        with lock:
            if len(answered) >= samples:
                again.set()
            answer = generate(body)
            answered.append(body)
            if len(answered) == samples:
                server.restart()
        return answer

    server.generate = generate_and_restart
    if steady is not None:
        answer = steady.generate
        steady.generate = lambda body: again.wait(60) and answer(body)


KINDS = ["stops", "cannot stop", "no plugin"]


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_restarted_between_two_requests_gives_no_sample_until_the_next_update(checkpoint, kind, samples):
    """Nor where it is restarted between update and sample."""
    restarted, steady = server_of(kind), server_of("stops")
    engine = engine_of(restarted, steady, sglang_weights="tensor", checkpoint=checkpoint)
    engine.update_weights(new(0.5), 1)
    expected = engine.generate(requests(*[2] * 12))
    assert engine.health() == {"http://a": "", "http://b": ""}
    restart_after(samples, restarted, steady)

    found = engine.generate(requests(*[2] * 12))

    assert torch.equal(found.clean, expected.clean)
    assert "it was restarted, or somebody else updates it" in engine.fleet.members[0].evicted
    engine.update_weights(new(0.25), 2)
    assert (restarted.scale, engine.health()["http://a"]) == (0.25, "")


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_server_that_is_restarted_and_then_fails_are_not_kept(checkpoint, kind):
    """It is asked for its weights no more."""
    restarted, steady = server_of(kind), server_of("stops")
    engine = engine_of(restarted, steady, sglang_weights="tensor", checkpoint=checkpoint)
    engine.update_weights(new(0.5), 1)
    expected = engine.generate(requests(*[2] * 12))
    generate = restarted.generate

    def generate_and_fail(body):
        if restarted.updates == 0:
            restarted.broken["/rollout/generate"] = 500
        return generate(body)

    restarted.generate = generate_and_fail
    restart_after(1, restarted, steady)

    assert torch.equal(engine.generate(requests(*[2] * 12)).clean, expected.clean)
    assert restarted.broken


@pytest.mark.parametrize("kind", KINDS)
def test_only_server_that_is_restarted_between_two_requests_ends_the_rollout(checkpoint, kind):
    server = server_of(kind)
    engine = engine_of(server, sglang_weights="tensor", checkpoint=checkpoint)
    engine.update_weights(new(0.5), 1)
    restart_after(2, server)

    with pytest.raises(EngineError, match=r"no SGLang server is left: http://a .* it was restarted, or somebody else"):
        engine.generate(requests(*[2] * 12))


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_restarted_before_an_update_is_compared_as_at_the_start(checkpoint, kind):
    restarted, steady, compared = server_of(kind), FakeServer(), []
    more = {"require_encoders": lambda client, *more: compared.append(client.url), "sglang_weights": "tensor"}
    engine = engine_of(restarted, steady, checkpoint=checkpoint, **more)
    engine.update_weights(new(0.5), 1)
    restarted.restart()
    compared.clear()

    engine.update_weights(new(0.25), 2)

    assert compared == ["http://a"]
    assert (restarted.scale, engine.health()) == (0.25, {"http://a": "", "http://b": ""})


def test_restart_of_a_server_without_our_plugin_is_found_out(checkpoint):
    """It counts no updates, so its weights are asked for."""
    restarted, steady = FakeServer(plugin=False), FakeServer(plugin=False)
    engine = engine_of(restarted, steady, sglang_weights="tensor", checkpoint=checkpoint)
    engine.update_weights(new(0.5), 1)
    expected = engine.generate(requests(*[2] * 6))
    restarted.restart()

    found = engine.generate(requests(*[2] * 6))

    assert torch.equal(found.clean, expected.clean)
    assert "holds other weights than it was sent" in engine.fleet.members[0].evicted


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("while_it", ["sleeps", "wakes", "is updated"])
def test_attached_server_that_is_restarted_is_waited_for_and_given_the_next_weights(while_it):
    server = FakeServer()
    engine = engine_of(server, sglang_deadline=30.0)
    engine.update_weights(new(0.5), 1)
    refused = httpx.ConnectError("refused")
    refused.__cause__ = ConnectionRefusedError()

    def restarts():
        server.restart()
        server.failing["all"] = [refused] * 2

    if while_it == "sleeps":
        restarts()
    engine.sleep()
    if while_it == "wakes":
        restarts()
    engine.wake()
    if while_it == "is updated":
        restarts()
    engine.update_weights(new(0.25), 2)

    assert (server.scale, server.failing["all"]) == (0.25, [])
    assert engine.generate(requests(1)).policy_version == 2


def test_server_that_was_restarted_with_other_encoders_stays_out():
    lost, steady = FakeServer(), FakeServer()
    others = []

    def require_encoders(client, capabilities, patience):
        if client.url in others:
            raise EngineRefused(f"{client.url} has another text_encoder")

    engine = engine_of(lost, steady, require_encoders=require_encoders)
    engine.update_weights(new(0.5), 1)
    lost.restart()
    others.append("http://a")
    engine.generate(requests(*[1] * 6))

    engine.update_weights(new(0.25), 2)

    assert engine.fleet.members[0].evicted.endswith("has another text_encoder")
