"""SGLang options: refusals before anything starts, and the arguments of servers that the run starts."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from processes import lives, wait_for

from miles_dmd.config.cli import parse_args
from miles_dmd.engines.sglang import launch
from miles_dmd.engines.sglang.families import scheduler_directory, served
from miles_dmd.engines.sglang.launch import ManagedServer, Ports, command, environment, free_ports, serve
from miles_dmd.engines.sglang.server_flags import owned
from miles_dmd.errors import ConfigError, EngineError
from miles_dmd.preflight.rules import resolve

OWN = ("--sglang-python", sys.executable)
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
        ((*URL, "--sglang-log-dir", "x"), "--sglang-log-dir x is for servers that the run starts"),
        ((*URL, "--sglang-start-timeout", "5"), "--sglang-start-timeout 5.0 is for servers that the run starts"),
        ((*URL, "--num-sglang-servers", "2"), "--num-sglang-servers 2 is for servers that the run starts"),
        (("--sglang-python", sys.executable, "--sglang-args", "--a 'b"), '--sglang-args "--a \'b" cannot be read'),
        *(
            (
                (*OWN, f"--sglang-args={given}"),
                f"--sglang-args {said}: the run sets that itself",
            )
            for given, said in (
                ("--port 1", "--port"),
                ("--por 1", "--por (for --port)"),
                ("--log-level debug --strict_p", "--strict_p (for --strict-ports)"),
                ("--dit_precision=bf16", "--dit_precision=bf16"),
                ("--text-enc bf16", "--text-enc (for --text-encoder-precisions)"),
                ("--component-paths.scheduler=/x", "--component-paths.scheduler=/x"),
                ("--component-precisions.vae fp32", "--component-precisions.vae (for --component-precisions)"),
                ("--config more.yaml", "--config"),
            )
        ),
        *(
            (
                (*OWN, "--device", "auto", f"--sglang-args={given}"),
                "has the device of its bundle",
            )
            for given in ("--tp-size 2", "--tp_size=2", "--tp 2", "--num-gpus 2")
        ),
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
        resolve(parse_args(flags("--sglang-url", "http://a")))


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


@pytest.mark.parametrize("given", ["--tp-size 2", "--log-level debug", "--lora-path /x", "--enable-torch-compile"])
def test_flags_that_are_not_the_runs_own_are_passed_on(make_args, given):
    args = sglang(make_args, "--sglang-python", sys.executable, f"--sglang-args={given}")

    assert " ".join(command(args, "cpu", "127.0.0.1", Ports(7, 9, 10), "me")).endswith(given)


def test_command_names_all_that_samples_depend_on(make_args, teacher):
    more = ("--sglang-args", "--log-level debug", "--compute-dtype", "bf16")
    args = sglang(make_args, "--sglang-python", sys.executable, *more)

    words = command(args, "cpu", "127.0.0.1", Ports(7, 9, 10), "me")

    assert words[:4] == [sys.executable, "-m", "miles_dmd_sglang.serve", "--die-with-stdin"]
    assert words[-2:] == ["--log-level", "debug"]
    text = " ".join(words)
    assert f"--model-path {teacher.resolve()} --model-id stable-diffusion-3.5-medium" in text
    assert "--strict-ports --served-model-name me --host 127.0.0.1 --port 7 --scheduler-port 9 --master-port 10" in text
    assert "--component-residency all=resident" in text
    assert "--dit-precision bf16" in text
    assert "--text-encoder-precisions bf16 bf16 bf16" in text


def test_every_flag_of_the_command_is_the_runs_own(make_args):
    """But for that of residency, which a user may want otherwise."""
    words = command(sglang(make_args, "--sglang-python", sys.executable), "cpu", "127.0.0.1", Ports(7, 9, 10), "me")

    flags = {word for word in words if word.startswith("--")}

    assert {flag for flag in flags if not owned(flag)} == {"--component-residency"}


def test_the_pages_attach_command_starts_what_the_run_would_start(make_args):
    """But for what a run needs to know its own server again."""
    page = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()
    (block,) = re.findall(r"python -m (miles_dmd_sglang\.serve (?:.*\\\n)*.*)", page)
    shown = shlex.split(block.replace("\\\n", " "))

    words = command(sglang(make_args, *OWN), "cpu", "127.0.0.1", Ports(30000, 9, 10), "me")[2:]

    own = {"--die-with-stdin", "--served-model-name", "--scheduler-port", "--master-port"}
    assert valued(shown).keys() == valued(words).keys() - own
    for flag in (*PRECISIONS, "--component-residency", "--warmup-mode", "--host", "--port", "--model-id"):
        assert valued(shown)[flag] == valued(words)[flag]


PRECISIONS = ("--dit-precision", "--vae-precision", "--text-encoder-precisions")


def valued(words):
    """flag -> what follows it."""
    found = {}
    for word in words:
        if word.startswith("--"):
            found[word] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


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


def managed(script, tmp_path, start_timeout=60.0, host="127.0.0.1"):
    """A server that is a script, whose arguments are its port and its name."""

    def command(ports, name):
        return [sys.executable, "-c", script, str(ports.http), name]

    return ManagedServer(command, host, tmp_path / "log", os.environ, start_timeout)


def test_server_that_never_answers_is_given_up_and_ended(tmp_path):
    server = managed("import sys; print('loading', flush=True); sys.stdin.read()", tmp_path, start_timeout=1.0)

    with pytest.raises(EngineError, match="did not answer within --sglang-start-timeout 1 s: loading"):
        server.wait()

    server.close()
    assert server.process.returncode == 0


SERVER_WITH_A_WORKER = """
import http.server, json, os, subprocess, sys, threading
print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
        self.wfile.write(json.dumps({"served_model_name": sys.argv[2]}).encode())
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.mark.parametrize(
    ("words", "lives_on"),
    [("RuntimeError: HTTP port 1 is unavailable and --strict-ports is enabled. Either use", False),
     ("[Errno 98] error while attempting to bind: Address already in use", False),
     ("Offline request broker exited; restart the server.", True)],
)  # fmt: skip
def test_server_whose_port_was_taken_is_started_again_on_others(tmp_path, caplog, words, lives_on):
    once = tmp_path / "once"
    first = f"""
import os, sys
if not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w").close()
    print({words!r}, flush=True)
    {"sys.stdin.read()" if lives_on else ""}
    sys.exit(1)
"""
    server = managed(first + SERVER_WITH_A_WORKER, tmp_path)
    before = server.url

    assert server.wait() == server.url != before

    assert f"a port of the SGLang server at {before} was taken" in caplog.text
    server.close()


def test_stranger_at_the_servers_port_is_not_taken_for_it(tmp_path, monkeypatch):
    """It answers /health while the server loads, and then finds its port taken."""
    stranger = managed(SERVER_WITH_A_WORKER, tmp_path / "stranger")
    stranger.wait()
    taken = Ports(int(stranger.url.rpartition(":")[2]), 1, 2)
    monkeypatch.setattr(launch, "free_ports", lambda host: taken)

    server = managed("import sys; sys.stdin.read()", tmp_path, start_timeout=2.0)
    with pytest.raises(EngineError, match="did not answer within"):
        server.wait()

    server.close()
    stranger.close()


def test_ports_are_different_and_the_one_after_that_of_http_is_free():
    ports = free_ports("127.0.0.1")

    assert len({*ports, ports.http + 1}) == 4


@pytest.fixture
def server_with_a_worker(tmp_path):
    """(server, process id of its worker), up."""
    server = managed(SERVER_WITH_A_WORKER, tmp_path)
    server.wait()
    yield server, int(re.search(r"^worker (\d+)$", server.log.read_text(), re.MULTILINE)[1])
    server.close()


def test_death_of_a_server_is_told_and_its_workers_end_with_it(server_with_a_worker, caplog):
    server, worker = server_with_a_worker

    server.process.kill()
    server._watcher.join()

    assert re.search(rf"the SGLang server at {server.url} ended with status -9: .* \(log: ", caplog.text)
    wait_for(lambda: not lives(worker), 120, "end of the worker")


def test_end_of_a_server_that_is_no_longer_needed_is_not_told(server_with_a_worker, caplog):
    server, worker = server_with_a_worker

    server.close()

    assert caplog.text == ""
    wait_for(lambda: not lives(worker), 120, "end of the worker")
