"""Several servers as one engine: who is asked, who is taken out and in again, and which samples are refused."""

import importlib.util
from pathlib import Path

import httpx
import pytest
import torch

from miles_dmd.engines.sglang import Options, weights
from miles_dmd.errors import EngineError, EngineRefused

_spec = importlib.util.spec_from_file_location("fake_sglang", Path(__file__).parent / "fake_sglang.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)
FakeServer, engine_of, requests, new = fake.FakeServer, fake.engine_of, fake.requests, fake.new


def test_server_without_our_plugin_gives_the_same_samples():
    stops, captures = engine_of(FakeServer()), engine_of(FakeServer(plugin=False))

    found, expected = captures.generate(requests(0, 1, 2, 3)), stops.generate(requests(0, 1, 2, 3))

    torch.testing.assert_close(found.latents, expected.latents)
    torch.testing.assert_close(found.clean, expected.clean)
    assert (stops.forwards, captures.forwards) == (10, 16)
    assert "because it has no plugin of ours" in captures.notes[0]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeServer(version="0.5.21"), "http://a runs SGLang 0.5.21; install 0.5.22 or later"),
        (FakeServer(version=""), "http://a runs SGLang of unknown version"),
        (FakeServer(pipeline="FluxPipeline"), "http://a serves FluxPipeline; the run wants StableDiffusion3Pipeline"),
        (FakeServer(protocol=2), "http://a has our plugin with protocol 2, this is 1"),
    ],
)
def test_server_that_cannot_be_used_is_refused_with_the_reason(server, message):
    with pytest.raises(EngineRefused, match=message):
        engine_of(server)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1", "0.6.0", "1.0"])
def test_later_version_is_taken(version):
    assert f"SGLang {version}" in engine_of(FakeServer(version=version)).notes[0]


def test_other_noise_is_said_once():
    (note,) = engine_of(FakeServer(seed_shift=1)).notes

    assert "samples differ from the in-process engine's: its initial latents" in note
    assert "differ" not in engine_of(FakeServer()).notes[0]


def test_work_is_shared():
    servers = FakeServer(), FakeServer()
    engine = engine_of(*servers)

    engine.generate(requests(*[1] * 20))

    assert min(server.asked.count("/rollout/generate") for server in servers) > 2  # two are the probe's


@pytest.mark.parametrize("failure", ["down", "broken"])
def test_server_that_fails_is_taken_out_and_its_samples_come_from_another(failure):
    dead, alive = FakeServer(), FakeServer()
    engine = engine_of(dead, alive)
    expected = engine.generate(requests(*[1] * 6))
    fail(dead, failure)

    found = engine.generate(requests(*[1] * 6))

    assert torch.equal(found.clean, expected.clean)
    assert [bool(member.evicted) for member in engine.fleet.members] == [True, False]


def fail(server, how):
    if how == "down":
        server.down = True
    else:
        server.broken["/rollout/generate"] = 500


def test_without_any_server_the_reasons_are_told():
    servers = FakeServer(), FakeServer()
    engine = engine_of(*servers)
    servers[0].down, servers[1].broken = True, {"/rollout/generate": 503}

    with pytest.raises(EngineError, match=r"no SGLang server is left: http://a.*ConnectError.*; http://b.*status 503"):
        engine.generate(requests(1, 1))


def test_refusal_ends_the_call_and_takes_nobody_out():
    server = FakeServer()
    engine = engine_of(server)
    server.broken["/rollout/generate"] = 400

    with pytest.raises(EngineRefused, match="status 400"):
        engine.generate(requests(1))

    assert engine.health() == {"http://a": ""}


def test_server_that_was_restarted_is_found_out():
    restarted, steady = FakeServer(), FakeServer()
    engine = engine_of(restarted, steady)
    engine.update_weights(new(0.5), 1)
    expected = engine.generate(requests(*[2] * 6))
    restarted.restart()

    found = engine.generate(requests(*[2] * 6))

    assert torch.equal(found.clean, expected.clean)
    assert "it was restarted, or somebody else updates it" in engine.fleet.members[0].evicted


def test_server_that_comes_back_gets_the_weights_and_a_real_sample_before_it_is_taken_in():
    lost, steady = FakeServer(), FakeServer()
    engine = engine_of(lost, steady)
    lost.down = True
    engine.generate(requests(*[1] * 6))
    lost.restart()
    lost.asked.clear()

    engine.update_weights(new(0.5), 1)

    assert [member.evicted for member in engine.fleet.members] == ["", ""]
    assert lost.scale == 0.5
    assert lost.asked.index("/update_weights_from_tensor") < lost.asked.index("/rollout/generate")


def test_server_that_answers_but_cannot_sample_stays_out():
    lost, steady = FakeServer(), FakeServer()
    engine = engine_of(lost, steady)
    lost.broken["/rollout/generate"] = 500
    engine.generate(requests(*[1] * 6))

    engine.update_weights(new(0.5), 1)

    assert [bool(member.evicted) for member in engine.fleet.members] == [True, False]


def test_failed_update_of_one_server_fails_and_nothing_is_sampled_until_one_succeeds():
    servers = FakeServer(), FakeServer()
    engine = engine_of(*servers)
    servers[1].broken["/update_weights_from_tensor"] = 400

    with pytest.raises(EngineRefused, match="http://b/update_weights_from_tensor"):
        engine.update_weights(new(0.5), 1)
    with pytest.raises(EngineError, match="the last weight update failed"):
        engine.generate(requests(0))

    servers[1].broken.clear()
    engine.update_weights(new(0.5), 1)
    assert engine.generate(requests(0)).policy_version == 1


@pytest.mark.parametrize(
    ("verify", "interval", "noticed"),
    [
        ("off", 1, []),
        ("first", 0, [1]),
        ("first", 1, [1, 2, 3, 4]),
        ("first", 2, [1, 2, 4]),
        ("every", 0, [1, 2, 3, 4]),
    ],
)
def test_updates_are_compared_as_often_as_asked(verify, interval, noticed):
    server = FakeServer()
    engine = engine_of(server)
    engine.options = Options(verify_weights=verify, verify_weights_interval=interval)
    found = []
    for version in (1, 2, 3, 4):
        server.asked.clear()
        engine.update_weights(new(0.5 / version), version)
        found += [version] if "/update_weights_from_tensor_checker" in server.asked else []

    assert found == noticed


@pytest.mark.parametrize("counts", [True, False])
def test_later_push_that_answers_success_and_applies_nothing_is_noticed(counts):
    """By the tensors that are compared, where the server counts it; by its count, where it does not."""
    server = FakeServer()
    engine = engine_of(server)
    engine.options = Options(verify_weights="first", verify_weights_interval=int(counts))
    engine.update_weights(new(0.5), 1)
    server.deaf, server.counts = True, counts

    message = "does not hold the weights that it was sent" if counts else "was sent 1 parts .* and has applied 0"
    with pytest.raises(EngineError, match=message):
        engine.update_weights(new(0.25), 2)


def test_push_beside_which_somebody_else_updates_the_server_is_noticed():
    server = FakeServer()
    engine = engine_of(server)
    take = server.update_weights_from_tensor
    server.update_weights_from_tensor = lambda body: (take(body), take(body))[0]

    with pytest.raises(EngineError, match=r"was sent 1 parts .* and has applied 2: .* somebody else updates it"):
        engine.update_weights(new(0.5), 1)


def test_push_that_was_repeated_and_applied_twice_is_whole():
    server = FakeServer()
    engine = engine_of(server, sglang_deadline=5.0)
    answers = iter([httpx.ReadError("reset")])
    server.after["/update_weights_from_tensor"] = lambda: next(answers, None)

    engine.update_weights(new(0.5), 1)

    assert (server.updates, server.scale, engine.generate(requests(1)).policy_version) == (2, 0.5, 1)


def test_other_tensors_are_compared_for_every_version():
    names = [f"block.{number}" for number in range(100)]

    first, second = weights.sampled(names, 1), weights.sampled(names, 2)

    assert len(first) == len(second) == 16
    assert first != second


def test_weights_that_do_not_arrive_are_noticed():
    server = FakeServer()
    engine = engine_of(server)
    engine.options = Options(verify_weights="first")
    server.deaf = True

    with pytest.raises(EngineError, match="http://a does not hold the weights that it was sent"):
        engine.update_weights(new(0.5), 1)


def test_server_that_only_says_that_it_sleeps_is_not_believed():
    server = FakeServer()
    engine = engine_of(server)
    server.insomniac = True

    with pytest.raises(EngineError, match="/release_memory_occupation says success, and the server is awake"):
        engine.sleep()


def test_dead_server_does_not_keep_the_others_from_sleeping():
    dead, alive = FakeServer(), FakeServer()
    engine = engine_of(dead, alive)
    dead.down = True

    engine.sleep()

    assert (engine.fleet.asleep, alive.asleep) == (True, True)
