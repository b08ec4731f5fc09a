"""The real SGLang server: true stops counted there, a server without our plugin, failures in mid-rollout, a run."""

import json
import os
import shutil
import signal
from pathlib import Path

import msgpack
import pytest
import torch
from processes import wait_for, writing_to
from safetensors.torch import load

from miles_dmd.client import Client
from miles_dmd.engines.sglang import delivery, launch
from miles_dmd.engines.sglang.probe import MODULE, REPORT
from miles_dmd.engines.sglang.wire import ROLLOUT, STOP_KEY
from miles_dmd.errors import EngineError, EngineMisanswer, EngineRefused
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer
from miles_dmd.training.export import exported_buckets

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # two servers that start beside each other on a busy machine

STEPS = 4
LOSSES = ("samples/diversity", "actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "actor/normalizer")


def requests(*stop_steps, seed=2**62):
    return [DenoisingRequest(7 + i, i % 10, seed + i, stop) for i, stop in enumerate(stop_steps)]


def client_of(url):
    return Client(url, timeout=60.0, deadline=0.0, connections=1)


def counters(url):
    return client_of(url).post("/get_weights_checksum", {"module_names": [REPORT]})[REPORT]["counters"]


@pytest.fixture
def engine(open_engine, sglang_server):
    engine = open_engine("sglang", "--sglang-url", sglang_server.url)
    yield engine
    engine.close()


def moved(engine, amount=0.02):
    """The engine's first weights, all a little larger, without the table of positions."""
    parts = exported_buckets(Path(engine.args.hf_checkpoint) / MODULE, ())
    fixed = engine.network.fixed
    return [{name: value * (1 + amount) for name, value in part.items() if name not in fixed} for part in parts]


# -- true stop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_step", range(STEPS))
def test_server_runs_as_many_forwards_as_a_sample_needs(engine, sglang_server, stop_step):
    before = counters(sglang_server.url)["forwards"]

    engine.generate(requests(stop_step, stop_step))

    assert counters(sglang_server.url)["forwards"] - before == 2 * (stop_step + 1)


@pytest.mark.parametrize("stop_step", [-1, STEPS])
def test_server_refuses_a_step_that_the_sampler_does_not_have(sglang_server, engine, stop_step):
    body = body_of(engine, {"diffusers_kwargs": {STOP_KEY: stop_step}})

    with pytest.raises(EngineRefused, match=rf"miles_dmd: stop step {stop_step} lies outside \[0, 3\]"):
        client_of(sglang_server.url).content(ROLLOUT, body)


def body_of(engine, extra):
    return {
        "prompt": engine.texts[0], "seed": 3, "generator_device": "cpu", "width": 64, "height": 64,
        "num_inference_steps": STEPS, "guidance_scale": 1.0, "rollout_sde_type": "cps", "rollout_noise_level": 1.0,
        "rollout_log_prob_no_const": True, "rollout_debug_mode": False, "rollout_return_dit_trajectory": True,
        "extra_sampling_params": {"max_sequence_length": 12, **extra},
    }  # fmt: skip


def test_ordinary_request_is_answered_as_ever(engine, sglang_server):
    """A whole trajectory and an image, whose latents are those of the stopped samples."""
    (answer,) = msgpack.unpackb(client_of(sglang_server.url).content(ROLLOUT, body_of(engine, {})))

    stopped = engine.generate([DenoisingRequest(0, 0, 3, stop) for stop in range(STEPS)])

    assert answer["generated_output"]["shape"] == [3, 64, 64]
    assert answer["dit_trajectory"]["latents"]["shape"] == [STEPS + 1, 16, 8, 8]
    latents = load(answer["dit_trajectory"]["latents"]["data"])["t"]
    assert torch.equal(latents[:STEPS], stopped.latents)


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_weights_travel_either_way(open_engine, sglang_server, how):
    more = ("--sglang-url", sglang_server.url, "--verify-weights", "every")
    engine = open_engine("sglang", *more, "--sglang-weights", how)
    before = engine.generate(requests(2))

    engine.update_weights(moved(engine), 1)
    engine.update_weights(moved(engine), 2)  # the folder of the first is still there

    after = engine.generate(requests(2))
    assert after.policy_version == 2
    assert (after.clean - before.clean).abs().max() > 1e-3


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_weights_that_change_on_the_way_are_noticed(engine, monkeypatch, how):
    transport = {"tensor": delivery.InRequests, "disk": delivery.ThroughFolder}[how]
    send = transport.send
    monkeypatch.setattr(transport, "send", lambda self, part: send(self, {k: v * 1.001 for k, v in part.items()}))
    engine.options = type(engine.options)(sglang_weights=how)

    with pytest.raises(EngineError, match=r"does not hold the weights that it was sent: .* checksum mismatch"):
        engine.update_weights(moved(engine), 1)

    with pytest.raises(EngineError, match="the last weight update failed"):
        engine.generate(requests(0))


def test_weights_of_another_shape_are_refused(engine):
    (first, *others) = moved(engine)
    name = next(name for name, value in first.items() if value.ndim == 2)

    with pytest.raises(EngineError, match=rf"weights of version 1: {name} has shape \(1, 1\)"):
        engine.update_weights([{**first, name: torch.zeros(1, 1)}, *others], 1)


def test_samples_of_weights_that_somebody_else_sent_are_refused(engine, open_engine, sglang_server):
    stranger = open_engine("sglang", "--sglang-url", sglang_server.url)
    stranger.update_weights(moved(stranger), 1)

    with pytest.raises(EngineError, match=r"no SGLang server is left: .* or somebody else updates it"):
        engine.generate(requests(0))


def test_server_that_another_run_has_used_is_given_the_checkpoint(engine, open_engine, sglang_server):
    before = engine.generate(requests(1))
    engine.update_weights(moved(engine), 1)

    fresh = open_engine("sglang", "--sglang-url", sglang_server.url)

    assert torch.equal(fresh.generate(requests(1)).clean, before.clean)


# -- what does not fit ----------------------------------------------------------------------------------------------


def test_other_sigma_grid_is_refused_with_the_cure(open_engine, sglang_server):
    with pytest.raises(EngineMisanswer, match=r"at sigmas 1, 0.9, 0.75, 0.5, 0; the run wants .* start that server"):
        open_engine("sglang", "--sglang-url", sglang_server.url, "--shift", "5")


def test_server_that_sleeps_says_so(engine, sglang_server):
    engine.sleep()
    try:
        with pytest.raises(EngineRefused, match="sleeping"):
            client_of(sglang_server.url).content(ROLLOUT, body_of(engine, {}))
    finally:
        engine.wake()


def test_server_that_a_run_has_left_asleep_is_woken_by_the_next(engine, open_engine, sglang_server):
    before = engine.generate(requests(1))
    engine.sleep()

    fresh = open_engine("sglang", "--sglang-url", sglang_server.url)

    assert torch.equal(fresh.generate(requests(1)).clean, before.clean)
    fresh.sleep()
    fresh.close()
    engine.fleet.asleep = False
    assert torch.equal(engine.generate(requests(1)).clean, before.clean)  # left awake, as it was found


# -- several servers, SD3's architecture, a release without our plugin ------------------------------------------------


@pytest.fixture(scope="module")
def plain_sd3(teacher, tmp_path_factory):
    """SD3's architecture, without what SD3.5 added (dual attention, normed queries and keys); random weights."""
    from diffusers import SD3Transformer2DModel

    directory = tmp_path_factory.mktemp("plain") / "teacher"
    shutil.copytree(teacher, directory)
    config = json.loads((directory / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    network = SD3Transformer2DModel.from_config({**config, "dual_attention_layers": (), "qk_norm": None})
    network.save_pretrained(directory / "transformer")
    return directory


@pytest.fixture(scope="module")
def pair(plain_sd3, start_sglang):
    """Two servers of that network, the second without our plugin."""
    servers = [
        start_sglang("--hf-checkpoint", str(plain_sd3)),
        start_sglang("--hf-checkpoint", str(plain_sd3), SGLANG_PLUGINS="none"),
    ]
    for server in servers:
        server.wait()
    return servers


@pytest.mark.parametrize("solver", ["renoise", "euler"])
def test_two_servers_sample_as_one_with_our_plugin_or_without(pair, plain_sd3, open_engine, solver):
    more = ("--hf-checkpoint", str(plain_sd3), "--solver", solver)
    reference = open_engine("inprocess", *more).generate(requests(*range(STEPS)))

    for urls, forwards in (([pair[0].url], 10), ([pair[1].url], 16), ([server.url for server in pair], None)):
        engine = open_engine("sglang", *more, "--sglang-url", *urls)
        found = engine.generate(requests(*range(STEPS)))
        torch.testing.assert_close(found.latents, reference.latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(found.clean, reference.clean, rtol=0, atol=1e-4)
        assert forwards in (None, engine.forwards)
    assert "stops at the requested step (plugin 0.1.0)" in engine.notes[0]
    assert "keeps one of them, because it has no plugin of ours" in engine.notes[1]


def test_rollout_goes_on_without_a_server_that_fails(pair, plain_sd3, open_engine):
    """One hangs in the middle and comes back; then it is killed; then there is none."""
    more = ("--hf-checkpoint", str(plain_sd3), "--sglang-deadline", "1", "--sglang-timeout", "5")
    engine = open_engine("sglang", *more, "--sglang-url", *(server.url for server in pair))
    reference = open_engine("inprocess", *more[:2])
    asked = requests(*([1, 3] * 10))
    server = pair[0].process

    after(engine, 5, lambda: os.killpg(server.pid, signal.SIGSTOP))
    assert_same(engine.generate(asked), reference.generate(asked))
    hanging, alive = engine.health().values()
    assert "no answer within" in hanging
    assert alive == ""

    os.killpg(server.pid, signal.SIGCONT)
    buckets = moved(engine)
    engine.update_weights(buckets, 1)
    reference.update_weights(buckets_of(reference, buckets), 1)
    assert list(engine.health().values()) == ["", ""]
    assert_same(engine.generate(asked), reference.generate(asked))

    after(engine, 5, server.kill)
    assert_same(engine.generate(asked), reference.generate(asked))
    assert [bool(member.evicted) for member in engine.fleet.members] == [True, False]

    pair[1].close()
    with pytest.raises(EngineError, match=r"no SGLang server is left: .*ConnectError.*ConnectError"):
        engine.generate(asked)


def test_server_that_is_restarted_in_mid_rollout_gives_no_sample_of_its_pipelines_weights(
    open_engine, start_sglang, monkeypatch
):
    ports = launch.free_ports("127.0.0.1")
    monkeypatch.setattr(launch, "free_ports", lambda host: ports)
    server = start_sglang()
    engine = open_engine("sglang", "--sglang-url", server.wait(), "--sglang-concurrency", "1")
    engine.update_weights(moved(engine), 1)
    asked = requests(1, 3, 1, 3)
    expected = engine.generate(asked)

    after(engine, 2, lambda: (server.close(), start_sglang().wait()))
    with pytest.raises(EngineError, match=r"no SGLang server is left: .* has had 0 weight updates, and \d are known"):
        engine.generate(asked)

    engine.update_weights(moved(engine), 2)
    assert_same(engine.generate(asked), expected)


def assert_same(found, expected):
    torch.testing.assert_close(found.latents, expected.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.clean, expected.clean, rtol=0, atol=1e-4)


def buckets_of(reference, buckets):
    known = dict(reference.model.network.named_parameters())
    return [{name: value for name, value in part.items() if name in known} for part in buckets]


def after(engine, samples, call):
    """``call`` as soon as the engine has got that many samples from anyone, once."""
    one, got = type(engine)._one.__get__(engine), []

    def counted(*parameters):
        sample = one(*parameters)
        got.append(sample)
        if len(got) == samples:
            call()
        return sample

    engine._one = counted


# -- whole runs -----------------------------------------------------------------------------------------------------


def losses(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return [(row["cycle"], name, row[name]) for row in rows for name in LOSSES if name in row]


def test_run_through_ray_with_its_own_server_equals_the_in_process_run(
    make_args, sglang_python, ray_cluster, tmp_path, capsys
):
    grids = ("--sample-prompts", "1", "--sample-interval", "1")
    DistillationTrainer(make_args("--local", *grids, "--save", str(tmp_path / "inprocess"))).fit()
    logs = tmp_path / "logs"
    flags = ("--sglang-python", sglang_python, "--sglang-log-dir", str(logs), "--save", str(tmp_path / "sglang"))

    DistillationTrainer(make_args("--rollout-engine", "sglang", *grids, *flags)).fit()

    expected, found = losses(tmp_path / "inprocess"), losses(tmp_path / "sglang")
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    apart = [(*place, abs(value - other) / value) for (*place, value), (*_, other) in zip(expected, found, strict=True)]
    assert [entry for entry in apart if entry[-1] > 1e-4] == []
    assert "stops at the requested step" in capsys.readouterr().out
    (log,) = logs.iterdir()
    wait_for(lambda: not writing_to(log), 10, "the server's workers end with it")
