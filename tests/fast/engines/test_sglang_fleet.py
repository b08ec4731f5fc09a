"""Servers over a run: they sleep and wake, hang, die, come back, change, and leave nothing behind."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tenacity import wait_none

from miles_dmd import client
from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.folders import OwnFolder, sweep
from miles_dmd.engines.sglang.wire import ROLLOUT
from miles_dmd.errors import EngineError, EngineRefused

_spec = importlib.util.spec_from_file_location("fake_sglang", Path(__file__).parent / "fake_sglang.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)
FakeServer, engine_of, requests, new = fake.FakeServer, fake.engine_of, fake.requests, fake.new


# -- servers that sleep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [True, False])
def test_server_that_a_run_has_left_asleep_is_woken(plugin):
    server = FakeServer(asleep=True, plugin=plugin)

    engine = engine_of(server)

    assert len(engine.generate(requests(1))) == 1


def test_servers_of_others_are_left_awake():
    server, own = FakeServer(), FakeServer()
    attached, managed = engine_of(server), engine_of(own, sglang_url=())
    for engine in (attached, managed):
        engine.sleep()

        engine.close()

    assert (server.asleep, own.asleep) == (False, True)  # those of the run end with it


def test_server_that_was_taken_out_and_lives_gives_its_memory_back():
    broken, steady = FakeServer(), FakeServer()
    engine = engine_of(broken, steady)
    broken.broken["/rollout/generate"] = 500
    engine.generate(requests(*[1] * 6))

    engine.sleep()

    assert (broken.asleep, steady.asleep) == (True, True)


def test_server_that_comes_back_asleep_is_woken():
    lost, steady = FakeServer(), FakeServer()
    engine = engine_of(lost, steady)
    lost.down = True
    engine.generate(requests(*[1] * 6))
    lost.restart()
    lost.asleep = True

    engine.update_weights(new(0.5), 1)

    assert [member.evicted for member in engine.fleet.members] == ["", ""]
    assert len(engine.generate(requests(*[1] * 6))) == 6


# -- the retry law: what passes within --sglang-deadline ends nothing -------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Repetitions do not wait."""
    monkeypatch.setattr(client, "BACKOFF", wait_none())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("failure", [httpx.Response(503, text="busy"), httpx.ReadError("reset"), httpx.ReadTimeout("")])
@pytest.mark.parametrize(
    "path",
    ["/health", "/release_memory_occupation", "/resume_memory_occupation", "/get_weights_checksum", "/rollout/generate",
     "/update_weights_from_tensor", "/server_info", "/model_info", "/update_weights_from_tensor_checker"],
)  # fmt: skip
def test_only_server_may_fail_for_a_moment_at_any_call(path, failure):
    server = FakeServer()
    server.failing[path] = [failure]
    engine = engine_of(server, sglang_deadline=30.0)
    for version in (1, 2):
        engine.options = Options(verify_weights="every")
        if path not in ("/server_info", "/model_info"):  # asked once, when a server is taken in
            server.failing[path] = [failure]
        engine.sleep()
        engine.wake()
        engine.update_weights(new(0.5 / version), version)
        engine.generate(requests(1))

    assert server.failing[path] == []
    assert engine.health() == {"http://a": ""}


def test_network_in_another_precision_is_named_with_the_cure():
    server = FakeServer()
    server.dtype = "torch.bfloat16"

    with pytest.raises(EngineRefused, match=r"http://a holds its network in bfloat16, and --compute-dtype is fp32: "):
        engine_of(server)


def test_server_over_several_devices_is_compared_with_the_checkpoint(checkpoint):
    """It tells the shapes of one device's shards."""
    server = FakeServer()
    server.tp_size, server.shape = 2, [7]
    engine = engine_of(server, checkpoint=checkpoint)

    engine.update_weights(new(0.5), 1)

    assert server.scale == 0.5


# -- servers that hang, fail or change --------------------------------------------------------------------------------


def test_server_that_hangs_is_given_seconds_and_not_minutes():
    """Questions about the server itself; a sample may take long."""
    hung, steady = FakeServer(), FakeServer()
    engine = engine_of(hung, steady, sglang_probe_timeout=7.0)
    hung.hung = {"all"}
    hung.waited.clear()

    engine.sleep()
    engine.wake()
    engine.update_weights(new(0.5), 1)

    assert sorted(set(hung.waited)) == [5.0, 7.0]
    assert "/health: no answer within 5 s" in engine.health()["http://a"]


def require_a_sample(client, capabilities, patience):
    """As the comparison of encoders does, which takes the very first."""
    client.content(ROLLOUT, {"prompt": "a cat", "seed": 1, **SAMPLE}, patience=patience)


SAMPLE = {"rollout_return_step_indices": [0], "extra_sampling_params": {}}


@pytest.mark.parametrize("require_encoders", [fake.no_encoders, require_a_sample])
def test_server_that_hangs_at_its_first_sample_is_given_a_limit_of_its_own(require_encoders):
    server = FakeServer()
    server.hung = {"/rollout/generate"}

    with pytest.raises(EngineError, match="rollout/generate: no answer within --sglang-first-sample-timeout 9"):
        engine_of(server, require_encoders=require_encoders, sglang_first_sample_timeout=9.0)

    assert server.waited[-1] == 9.0


def test_server_that_comes_back_is_given_that_limit_again_and_any_later_sample_the_usual_one():
    lost, steady = FakeServer(), FakeServer()
    limits = {"sglang_first_sample_timeout": 9.0, "sglang_probe_timeout": 7.0}
    engine = engine_of(lost, steady, require_encoders=require_a_sample, **limits)
    lost.down = True
    engine.generate(requests(*[1] * 6))
    lost.restart()
    lost.waited.clear()

    engine.update_weights(new(0.5), 1)
    assert 9.0 in lost.waited

    steady.down = True
    engine.generate(requests(1))
    assert lost.waited[-1] == 600.0


@pytest.mark.parametrize("path", ["/rollout/generate", "/update_weights_from_tensor", "/resume_memory_occupation"])
def test_server_that_fails_while_it_comes_back_stays_out_and_the_update_succeeds(path):
    lost, steady = FakeServer(), FakeServer()
    engine = engine_of(lost, steady)
    lost.down = True
    engine.generate(requests(*[1] * 6))
    lost.restart()
    lost.asleep = path == "/resume_memory_occupation"
    lost.broken[path] = 400

    engine.update_weights(new(0.5), 1)

    assert [bool(member.evicted) for member in engine.fleet.members] == [True, False]
    assert engine.generate(requests(1)).policy_version == 1


def test_dead_server_is_taken_out_while_another_comes_back():
    lost, dead, steady = servers = FakeServer(), FakeServer(), FakeServer()
    engine = engine_of(*servers)
    lost.down = True
    engine.generate(requests(*[1] * 9))
    lost.restart()
    dead.down = True

    engine.update_weights(new(0.5), 1)

    assert [bool(member.evicted) for member in engine.fleet.members] == [False, True, False]
    assert steady.scale == lost.scale == 0.5


def test_only_server_of_a_run_may_come_back():
    server = FakeServer()
    engine = engine_of(server)
    server.down = True
    with pytest.raises(EngineError, match="no SGLang server is left"):
        engine.generate(requests(1))
    server.restart()

    engine.update_weights(new(0.5), 1)

    assert engine.generate(requests(1)).policy_version == 1


def test_server_that_comes_back_with_another_law_stays_out():
    lost, steady = FakeServer(), FakeServer()
    engine = engine_of(lost, steady)
    lost.down = True
    engine.generate(requests(*[1] * 6))
    lost.restart()
    lost.seed_shift = 1

    engine.update_weights(new(0.5), 1)

    assert "samples otherwise than before its eviction: its initial latents" in engine.fleet.members[0].evicted


@pytest.fixture
def checkpoint(tmp_path):
    """Pipeline directory of the fake server's network."""
    (tmp_path / "transformer").mkdir()
    save_file({"scale": torch.ones(1)}, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    return tmp_path


@pytest.mark.parametrize("bucket", [{}, {"scale": torch.ones(1), "other": torch.ones(1)}, {"scale": torch.ones(2)}])
def test_weights_that_do_not_fit_the_checkpoint_are_refused_where_a_server_does_not_tell(checkpoint, bucket):
    engine = engine_of(FakeServer(plugin=False), checkpoint=checkpoint, sglang_weights="tensor")

    with pytest.raises(EngineError, match=r"weights of version 1(: scale has shape| lack \['scale'|  ?name \['other')"):
        engine.update_weights([bucket], 1)


def test_server_without_our_plugin_that_has_more_parameters_is_refused(checkpoint):
    server = FakeServer(plugin=False)
    server.get_weights_checksum = lambda body: dict.fromkeys(body["module_names"], "of more")

    with pytest.raises(EngineRefused, match=r"http://a has other parameters than .* has weights for"):
        engine_of(server, checkpoint=checkpoint, sglang_weights="tensor", verify_weights="first")


def test_every_update_through_a_folder_has_a_name_of_its_own(tmp_path):
    """A network file system whose cache is behind would show the files of the last update of that name."""
    folder = OwnFolder(tmp_path)

    names = [folder.fresh(f"version{version}").name for version in (0, 0, 1, 2)]

    assert len(set(names)) == 4
    assert {path.name for path in folder.path.iterdir()} == set(names[-2:])
    folder.close()


def test_weights_through_a_folder_leave_nothing(tmp_path, checkpoint):
    """Neither where the run ends, nor, after the next one has started, where it was killed."""
    script = (
        "import os, sys; from pathlib import Path; from miles_dmd.engines.sglang.folders import OwnFolder;"
        "OwnFolder(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    root = tmp_path / "sglang" / "weights"
    subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    other = OwnFolder(root)
    assert len(list(root.iterdir())) == 2

    sweep(root)

    assert list(root.iterdir()) == [other.path]
    engine = engine_of(FakeServer(), checkpoint=checkpoint, cache_dir=tmp_path, sglang_weights="disk")
    engine.close()
    other.close()
    assert list(root.iterdir()) == []
