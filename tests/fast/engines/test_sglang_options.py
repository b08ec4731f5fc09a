"""What is refused before anything starts, and what the servers that the run starts are told."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.launch import ManagedServer, command, environment, free_ports, serve
from miles_dmd.engines.sglang.schedule import scheduler_directory
from miles_dmd.errors import ConfigError, EngineError

URL = ("--sglang-url", "http://127.0.0.1:30000")


def sglang(make_args, *more):
    return make_args("--rollout-engine", "sglang", *more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--rollout-engine sglang needs --sglang-python"),
        (("--sglang-url", "127.0.0.1:30000"), "--sglang-url 127.0.0.1:30000 is no address"),
        (("--sglang-url", "http://"), "--sglang-url http:// is no address"),
        (("--sglang-python", "/no/python"), "--sglang-python /no/python: there is no such program"),
        ((*URL, "--sglang-python", sys.executable), "is for servers that the run starts"),
        ((*URL, "--num-sglang-servers", "2"), "--num-sglang-servers 2 is for servers that the run starts"),
        (("--sglang-python", sys.executable, "--sglang-args", "--a 'b"), '--sglang-args "--a \'b" cannot be read'),
        ((*URL, "--max-sequence-length", "64"), "--max-sequence-length 64: SGLang gives all text encoders"),
        ((*URL, "--sglang-timeout", "0"), "--sglang-timeout 0.0 must be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make_args, more, message):
    with pytest.raises(ConfigError) as error:
        sglang(make_args, *more)

    assert str(error.value).startswith(message) or message in str(error.value)
    assert "\n" not in str(error.value)


def test_flag_of_another_engine_is_named(flags):
    with pytest.raises(ConfigError, match="--sglang-url http://a is a flag of --rollout-engine 'sglang'"):
        parse_args(flags("--sglang-url", "http://a"))


def test_several_servers_are_attached_to(make_args):
    args = sglang(make_args, "--sglang-url", "http://a:1", "http://b:2")

    assert args.engine_options.sglang_url == ("http://a:1", "http://b:2")


def test_family_that_was_not_tried_is_refused():
    with pytest.raises(ConfigError, match="samples from sd3, not from --model-family wan"):
        served("wan")


def test_real_sd35_is_sent_no_text_length_and_the_digits_theirs(configuration_only, teacher):
    text_length = served("sd3").text_length

    assert text_length(configuration_only, 256) is None
    assert text_length(configuration_only, 77) == 77
    assert text_length(teacher, 12) == 12
    with pytest.raises(ConfigError, match=r"--max-sequence-length 128: .* pass 77 or 256"):
        text_length(configuration_only, 128)


def test_scheduler_asks_for_the_grid_before_one_shift(make_args, tmp_path):
    args = sglang(make_args, *URL, "--shift", "2.5", "--cache-dir", str(tmp_path))

    directory = scheduler_directory(args)

    content = json.loads((directory / "scheduler_config.json").read_text())
    assert (content["use_uniform_sigmas"], content["shift"], directory.name) == (True, 2.5, "scheduler")


def test_command_names_all_that_samples_depend_on(make_args, teacher):
    more = ("--sglang-args", "--tp-size 2", "--compute-dtype", "bf16")
    args = sglang(make_args, "--sglang-python", sys.executable, *more)

    words = command(args, host="127.0.0.1", ports=(7, 8, 9))

    assert words[:4] == [sys.executable, "-m", "miles_dmd_sglang.serve", "--die-with-stdin"]
    assert words[-2:] == ["--tp-size", "2"]
    text = " ".join(words)
    assert f"--model-path {teacher.resolve()} --model-id stable-diffusion-3.5-medium" in text
    assert "--host 127.0.0.1 --port 7 --scheduler-port 8 --master-port 9" in text
    assert "--dit-precision bf16" in text
    assert "--text-encoder-precisions bf16 bf16 bf16" in text


def test_environment_hides_our_packages(make_args, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")

    env = environment(sglang(make_args, *URL), device="cpu", host="127.0.0.1")

    assert "PYTHONPATH" not in env
    assert (env["HF_HUB_OFFLINE"], env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("1", "lo", "1")


def test_server_that_ends_at_once_is_told_with_its_last_words(make_args, tmp_path):
    """This Python has no sglang plugin: what a wrong --sglang-python looks like."""
    args = sglang(make_args, "--sglang-python", sys.executable, "--sglang-log-dir", str(tmp_path))
    server = serve(args, device="cpu", number=0, host="127.0.0.1")

    with pytest.raises(EngineError, match=r"status 1: .*No module named .*miles_dmd_sglang.* \(log: ") as error:
        server.wait()

    server.close()
    assert str(tmp_path) in str(error.value)


def test_server_that_never_answers_is_given_up_and_ended(tmp_path):
    command = [sys.executable, "-c", "import sys; print('loading', flush=True); sys.stdin.read()"]
    (port,) = free_ports("127.0.0.1", 1)
    server = ManagedServer(command, f"http://127.0.0.1:{port}", tmp_path / "log", os.environ, 1.0)

    with pytest.raises(EngineError, match="did not answer within --sglang-start-timeout 1 s: loading"):
        server.wait()

    server.close()
    assert server.process.returncode == 0


SERVER_WITH_A_WORKER = """
import http.server, os, subprocess, sys, threading
print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    do_GET = lambda self: (self.send_response(200), self.end_headers())
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def server_with_a_worker(tmp_path):
    """(server, process id of its worker), up."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-c", SERVER_WITH_A_WORKER, str(port)]
    server = ManagedServer(command, f"http://127.0.0.1:{port}", tmp_path / "log", os.environ, 60.0)
    server.wait()
    yield server, int(re.search(r"^worker (\d+)$", server.log.read_text(), re.MULTILINE)[1])
    server.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_death_of_a_server_is_told_and_its_workers_end_with_it(server_with_a_worker, caplog):
    server, worker = server_with_a_worker

    server.process.kill()
    server._watcher.join()

    assert re.search(rf"the SGLang server at {server.url} ended with status -9: .* \(log: ", caplog.text)
    wait_until_dead(worker)


def test_end_of_a_server_that_is_no_longer_needed_is_not_told(server_with_a_worker, caplog):
    server, worker = server_with_a_worker

    server.close()

    assert caplog.text == ""
    wait_until_dead(worker)


def wait_until_dead(pid):
    limit = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < limit
        time.sleep(0.01)
