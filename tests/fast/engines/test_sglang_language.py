"""Rollouts of language models over servers that restart, drop weights, stop elsewhere and die as the real one does."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fast.engines.fake_language_server import END, FakeLanguageServer, buckets, engine_of, requests, weights

from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.language.launch import command
from miles_dmd.engines.sglang.language.weights import Expected
from miles_dmd.engines.sglang.launch import Ports
from miles_dmd.errors import ConfigError, EngineError, EngineMisanswer, EngineRefused
from miles_dmd.modalities.language.options import LanguageOptions


@pytest.fixture
def server():
    return FakeLanguageServer()


@pytest.fixture
def engine(tmp_path, server):
    return engine_of(tmp_path, server)


def asked(server, path):
    return server.asked.count(path)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_what_the_servers_drew(engine):
    batch = engine.generate(requests(10, 11, 12))

    assert (batch.ids, batch.prompt_ids, batch.policy_version) == ((7, 8, 9), (0, 1, 0), 0)
    assert (batch.prompt_lengths, batch.response_lengths) == ((3, 2, 3), (6, 3, 6))
    assert batch.tokens[1].tolist() == [4, 5, 11, 12, END, 0, 0, 0, 0]
    assert (batch.logprobs[1, 3:] == 0).all()
    assert (batch.logprobs[1, :3] < 0).all()


def test_samples_come_from_the_seed_in_whatever_order(engine):
    batch, backwards = engine.generate(requests(10, 11)), engine.generate(list(reversed(requests(10, 11))))

    assert torch.equal(batch.tokens, backwards.tokens.flip(0))
    assert "repeats a sample by its seed" in engine.notes[0]


def test_a_server_that_knows_no_seeds_is_told_of(tmp_path, server):
    server.seeds = False

    assert "draws another sample each time" in engine_of(tmp_path, server).notes[0]


def test_other_end_tokens_are_refused(engine, server):
    server.end = 33

    with pytest.raises(
        EngineMisanswer, match=r"a response of 3 tokens ends with 33 \(stop\); the run's end after 6 or"
    ):
        engine.generate(requests(11))


def test_a_dead_server_is_evicted_and_another_asked(tmp_path):
    first, second = FakeLanguageServer(), FakeLanguageServer()
    engine = engine_of(tmp_path, first, second)
    first.down = True

    batch = engine.generate(requests(10, 12, 14))

    assert batch.ids == (7, 8, 9)
    assert [bool(member.evicted) for member in engine.fleet.members] == [True, False]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"version": "0.5.22"}, "runs SGLang 0.5.22; install 0.5.23 or later"),
        ({"dtype": "bfloat16"}, "computes in bfloat16, and --compute-dtype is fp32: start it with --dtype float32"),
        ({"preferred_sampling_params": {"top_p": 0.9}}, "has --preferred-sampling-params, so it samples from other"),
        ({"max_req_input_len": 8}, "has room for 8 tokens, and a prompt with its response may have 9"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(tmp_path, info, said):
    with pytest.raises(EngineRefused, match=said):
        engine_of(tmp_path, FakeLanguageServer(**info))


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_weights_arrive_and_are_compared(tmp_path, server, how):
    engine = engine_of(tmp_path, server, sglang_weights=how)
    before = engine.generate(requests(10))

    engine.update_weights(buckets(2.0), 1)

    after = engine.generate(requests(10))
    assert after.policy_version == 1
    assert torch.allclose(after.logprobs, 2 * before.logprobs)
    assert all(torch.equal(server.held[name], value) for name, value in weights(2.0).items())


@pytest.mark.parametrize("plugin", [True, False])
def test_weights_that_a_server_drops_are_noticed(engine, server, plugin):
    server.deaf, server.plugin = True, plugin

    with pytest.raises(EngineError, match=r"does not hold the weights that it was sent: it holds another .*4 of 4"):
        engine.update_weights(buckets(2.0), 1)
    with pytest.raises(EngineError, match="the last weight update failed"):
        engine.generate(requests(10))


def test_a_few_tensors_are_compared_later(engine, server):
    engine.update_weights(buckets(2.0), 1)
    server.deaf = True

    with pytest.raises(EngineError, match=r"holds another .* of 4 tensors"):
        engine.update_weights(buckets(3.0), 2)


def test_a_shape_that_would_end_the_server_is_not_sent(engine, server):
    (first, second) = buckets(2.0)

    with pytest.raises(EngineError, match=r"version 1: model.norm.weight has shape \(1,\), in the checkpoint \(4,\)"):
        engine.update_weights([first, {**second, "model.norm.weight": torch.zeros(1)}], 1)
    assert not server.down


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda first: {**first, "model.more.weight": torch.zeros(1)}, "name model.more.weight, which the checkpoint"),
        (lambda first: {}, r"lack \['model.embed_tokens.weight', .* \(2 parameters\)"),
    ],
)
def test_other_names_than_the_checkpoints_are_refused(engine, change, said):
    (first, second) = buckets(2.0)

    with pytest.raises(EngineError, match=said):
        engine.update_weights([change(first), second], 1)


def test_a_session_that_was_left_open_is_closed(engine, server):
    server.session = True

    engine.update_weights(buckets(2.0), 1)

    assert not server.session


def test_a_server_that_another_run_has_used_is_given_the_checkpoint(tmp_path, server):
    server.held = weights(5.0)

    engine_of(tmp_path, server)

    assert all(torch.equal(server.held[name], value) for name, value in weights().items())


def test_a_server_on_several_devices_is_not_compared_which_is_told(tmp_path):
    engine = engine_of(tmp_path, FakeLanguageServer(tp_size=2))

    assert engine.notes[0].endswith("; its weights are not compared")


def test_a_stock_server_on_a_gpu_is_not_compared_which_is_told(tmp_path, server):
    server.info["device"], server.plugin = "cuda", False

    assert engine_of(tmp_path, server).notes[0].endswith("; its weights are not compared")


def test_samples_of_a_restarted_server_are_not_taken(engine, server):
    engine.update_weights(buckets(2.0), 1)
    server.restart()

    with pytest.raises(EngineError, match=r"no SGLang server is left: .*sampled with weights default, and the run's"):
        engine.generate(requests(10))


def test_a_restarted_server_is_back_with_the_next_weights(engine, server):
    engine.update_weights(buckets(2.0), 1)
    server.restart()

    engine.update_weights(buckets(3.0), 2)

    assert engine.generate(requests(10)).policy_version == 2


def test_two_runs_at_one_server_are_noticed(tmp_path, server, engine):
    engine_of(tmp_path, server)

    with pytest.raises(EngineError, match="sampled with weights"):
        engine.generate(requests(10))


def test_stacked_matrices_are_those_of_all_their_parts():
    expected = Expected()

    for bucket in buckets(1.0):
        expected.add(bucket)

    assert sorted(expected.digests) == [
        "model.embed_tokens.weight", "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.self_attn.qkv_proj.weight", "model.norm.weight",
    ]  # fmt: skip


# -- sleep ------------------------------------------------------------------------------------------------------------


def test_a_server_sleeps_and_wakes_once(engine, server):
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(requests(10))
    engine.wake()
    engine.wake()

    assert engine.generate(requests(10)).ids == (7,)
    assert asked(server, "/release_memory_occupation") == asked(server, "/resume_memory_occupation") == 1


def test_a_server_that_was_restarted_asleep_is_not_woken(engine, server):
    engine.sleep()
    server.restart()

    engine.wake()

    assert not server.down
    assert "holds weights default, and was sent" in engine.health()["http://a"]


def test_a_busy_server_is_not_put_to_sleep(engine, server):
    server.busy = True

    with pytest.raises(EngineRefused, match="/flush_cache: status 400"):
        engine.sleep()
    assert not server.down


def test_a_lent_server_is_left_awake(engine, server):
    engine.sleep()

    engine.close()

    assert not server.asleep


def test_a_lent_server_that_was_restarted_asleep_is_left_alone(engine, server):
    engine.sleep()
    server.restart()

    engine.close()

    assert not server.down


# -- command line -----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"


def run_of(dtype="fp32", flags=""):
    return SimpleNamespace(
        engine_options=Options(sglang_python="python", sglang_concurrency=4, sglang_args=flags), compute_dtype=dtype,
        pipeline_directory=Path("/model"), modality_options=LanguageOptions(max_prompt_tokens=32, max_new_tokens=64),
    )  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "place"), [("cuda", "bf16", 0), ("cpu", "fp32", 1)])
def test_the_pages_command_starts_what_the_run_would_start(device, dtype, place):
    """But for what a run needs to know its own server again."""
    blocks = re.findall(r"python -m (miles_dmd_sglang\.serve_language (?:.*\\\n)*.*)", PAGE.read_text())
    shown = shlex.split(blocks[place].replace("\\\n", " "))

    words = command(run_of(dtype), device, "127.0.0.1", Ports(30000, 9, 10), "me")[2:]

    own = {"--die-with-stdin", "--served-model-name", "--nccl-port"}
    assert {word for word in shown if word[:2] == "--"} == {word for word in words if word[:2] == "--"} - own
    for flag in ("--dtype", "--port", "--sampling-backend"):
        assert after(shown, flag) == after(words, flag)


def after(words, flag):
    return words[words.index(flag) + 1]


def test_the_cache_holds_all_requests_that_are_under_way():
    words = command(run_of(), "cpu", "127.0.0.1", Ports(7, 9, 10), "me")

    assert int(after(words, "--max-total-tokens")) >= 4 * (32 + 64)


@pytest.mark.parametrize("flag", ["--dtype bfloat16", "--model-path /x", "--sampling-backend flashinfer"])
def test_what_the_run_sets_itself_is_refused(flag):
    with pytest.raises(ConfigError, match="the run sets that itself"):
        command(run_of(flags=flag), "cpu", "127.0.0.1", Ports(7, 9, 10), "me")
