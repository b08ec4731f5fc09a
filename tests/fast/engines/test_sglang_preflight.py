"""Servers and environments that are not there, or are something else, end a run before anything loads."""

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles_dmd.engines.sglang.preflight import preflight
from miles_dmd.errors import ConfigError
from miles_dmd.run import DistillationTrainer, main

WEB_PAGE = "<!DOCTYPE html><html><body>It works</body></html>"
SGLANG = {
    "/health": "{}",
    "/server_info": '{"version": "0.5.23"}',
    "/model_info": '{"architectures": ["StableDiffusion3Pipeline"]}',
}


@pytest.fixture
def answering():
    """``answering({path: (status, text)})``: the address of an HTTP server that answers so."""
    servers = []

    def start(answers):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = answers.get(self.path, answers.get("*", (404, WEB_PAGE)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args): ...

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def said(**changed):
    paths = {name: f"/{name}" for name in ("health", "server_info", "model_info")}
    return {path: (200, text) for path, text in (SGLANG | {paths[k]: v for k, v in changed.items()}).items()}


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"*": (200, WEB_PAGE)}, "the answer is no JSON: a web page, which SGLang does not send"),
        ({"*": (404, WEB_PAGE)}, "status 404: a web page, which SGLang does not send"),
        ({"*": (502, WEB_PAGE)}, "status 502: a web page, which SGLang does not send"),
        ({"*": (503, "loading")}, "status 503: loading"),
        ({"*": (200, "[]")}, "the answer is no object"),
        (said(server_info='{"version": "0.5.9"}'), "runs SGLang 0.5.9; install 0.5.22 or later"),
        (said(server_info="{}"), "runs SGLang of unknown version"),
        (said(model_info='{"architectures": ["FluxPipeline"]}'), "serves FluxPipeline"),
    ],
)
def test_address_where_something_else_answers_is_refused_before_anything_loads(
    flags, answering, tmp_path, capsys, answers, reason
):
    url = answering(answers)
    more = ("--rollout-engine", "sglang", "--sglang-url", url, "--sglang-deadline", "0.5")

    status = main(flags(*more, "--save", str(tmp_path / "run")))

    error = capsys.readouterr().err
    assert status == 2
    (line,) = [line for line in error.splitlines() if "--sglang-url" in line]
    assert f"--sglang-url {url}: no SGLang server that can be used answers there" in line
    assert reason in line
    assert "<" not in line
    assert not (tmp_path / "run").exists()


def test_address_where_nobody_listens_is_asked_for_as_long_as_any_call(make_args, nobody, caplog):
    args = make_args("--rollout-engine", "sglang", "--sglang-url", nobody, "--sglang-deadline", "1")

    with pytest.raises(ConfigError, match=rf"--sglang-url {nobody}: .*ConnectError"):
        preflight(args)

    assert f"{nobody}/health: ConnectError" in caplog.text


def test_every_address_is_asked(make_args, answering, nobody):
    urls = (answering(said()), nobody)
    args = make_args("--rollout-engine", "sglang", "--sglang-url", *urls, "--sglang-deadline", "0.2")

    with pytest.raises(ConfigError, match=f"--sglang-url {nobody}"):
        preflight(args)
    preflight(make_args("--rollout-engine", "sglang", "--sglang-url", urls[0]))


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 0.1.0 0.5.9", "has sglang 0.5.9; install 0.5.22 or later there"),
        (
            "echo 'No package metadata was found for miles-dmd-sglang' >&2; exit 1",
            "has no sglang with our plugin (No pa",
        ),
        ("exit 3", "has no sglang with our plugin (it says nothing)"),
        ("", "says nothing that names its sglang"),
    ],
)
def test_environment_that_lacks_something_is_refused(make_args, tmp_path, text, reason):
    python = program(tmp_path / "python", text)

    with pytest.raises(ConfigError) as error:
        preflight(make_args("--rollout-engine", "sglang", "--sglang-python", python))

    assert str(error.value).startswith(f"--sglang-python {python} ")
    assert reason in str(error.value)


def test_python_without_sglang_ends_a_run_before_anything_loads(make_args, tmp_path):
    args = make_args("--rollout-engine", "sglang", "--sglang-python", sys.executable, "--save", str(tmp_path / "run"))

    with pytest.raises(ConfigError, match=r"has no sglang with our plugin .*scripts/setup_sglang_cpu.sh"):
        DistillationTrainer(args).fit()

    assert not (tmp_path / "run").exists()


def test_file_that_is_no_program_is_refused(make_args, tmp_path):
    path = tmp_path / "python"
    path.write_bytes(b"\x7fELF of another machine")
    path.chmod(0o755)

    with pytest.raises(ConfigError, match=rf"--sglang-python {path} cannot be run"):
        preflight(make_args("--rollout-engine", "sglang", "--sglang-python", str(path)))


def test_preflight_imports_no_torch():
    script = "import sys, miles_dmd.engines.sglang.preflight; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=Path("/")).returncode == 0


# -- dry runs ---------------------------------------------------------------------------------------------------------


def test_dry_run_tells_what_was_asked_and_what_was_not(flags, answering, capsys):
    url = answering(said())

    status = main(flags("--rollout-engine", "sglang", "--sglang-url", url, "--dry-run"))

    assert status == 0
    shown = capsys.readouterr().out.splitlines()
    later = "weights, encoders, grid and samples are compared when the run starts"
    assert f"SGLang: {url} runs SGLang 0.5.23; {later}" in shown


def test_dry_run_refuses_what_a_run_would_and_waits_for_no_server(flags, nobody, capsys):
    status = main(flags("--rollout-engine", "sglang", "--sglang-url", nobody, "--dry-run"))

    error = capsys.readouterr().err
    assert status == 2
    assert f"--sglang-url {nobody}: no SGLang server that can be used answers there" in error
    assert "asked again" not in error


def test_dry_run_asks_the_python_of_servers_that_the_run_would_start(make_args, flags, tmp_path, capsys):
    python = program(tmp_path / "python", "echo 0.1.0 0.5.23")
    more = ("--rollout-engine", "sglang", "--dry-run", "--sglang-python")

    assert preflight(make_args(*more, python)).startswith(
        f"SGLang: --sglang-python {python} has sglang 0.5.23 and plugin 0.1.0; "
    )
    assert main(flags(*more, sys.executable)) == 2
    assert "has no sglang with our plugin" in capsys.readouterr().err


def test_things_of_another_node_are_not_asked_which_is_told(make_args, nobody):
    args = make_args("--rollout-engine", "sglang", "--sglang-url", nobody, "--ray-address", "10.0.0.1:6379")

    assert preflight(args).startswith("SGLang: nothing was asked, because servers and Python are those of the rollout")
