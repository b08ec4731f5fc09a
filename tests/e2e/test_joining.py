"""Clusters that want a token, and one that wants none: joined with the right one, refused in one line without it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd.errors import ConfigError

ROOT = Path(__file__).parents[2]
CLUSTER = """
import os, sys
import ray
from miles_dmd.cluster.supervision.session import ray_session

with ray_session(None, 240, sys.argv[1]):
    print(ray.get_runtime_context().gcs_address, os.environ.get("RAY_AUTH_TOKEN_PATH", ""), flush=True)
    sys.stdin.readline()
"""
"""A cluster of our own, as a run starts it, until a line comes in."""
FROM_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(scope="module")
def start_cluster():
    """``start_cluster("token")``: (process, address, file of the token)"""
    started = []

    def start(mode):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", CLUSTER, mode], cwd=ROOT, **pipes))
        address, _, path = started[-1].stdout.readline().rstrip("\n").partition(" ")
        return started[-1], address, Path(path)

    yield start
    for process in started:
        process.communicate("\n" if process.poll() is None else None)


@pytest.fixture(scope="module")
def guarded(start_cluster):
    return start_cluster("token")


@pytest.fixture
def user(monkeypatch, tmp_path):
    """``user(RAY_AUTH_TOKEN=...)``: an environment with these variables of Ray's; a home without a token."""

    def set_environment(**variables):
        for name in FROM_RAY:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_environment()
    return set_environment


def mode_of(address):
    from miles_dmd.cluster.supervision import authentication

    return authentication.mode_of(address, 240)


def test_own_cluster_answers_those_who_have_its_token_and_it_is_gone_with_the_cluster(start_cluster, user):
    process, address, path = start_cluster("token")
    closed, secret = (stat.S_IMODE(file.stat().st_mode) for file in (path.parent, path))

    with pytest.raises(ConfigError, match="wants a token, and there is none here"):
        mode_of(address)
    user(RAY_AUTH_TOKEN_PATH=str(path))
    with_token = mode_of(address)
    process.communicate("\n")

    assert (closed, secret) == (0o700, 0o600)
    assert with_token == "token"
    assert process.returncode == 0
    assert not path.parent.exists()


def test_cluster_that_wants_no_token_is_shown_none(start_cluster, user):
    _, address, path = start_cluster("disabled")
    user(RAY_AUTH_TOKEN="mine", RAY_AUTH_MODE="token")

    assert path == Path()
    assert mode_of(address) == "disabled"


def test_token_is_found_where_ray_looks_for_it(guarded, user, tmp_path):
    _, address, path = guarded
    token = path.read_text()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(f"{token}\n")

    at_home = mode_of(address)
    (tmp_path / ".ray" / "auth_token").write_text("another")
    user(RAY_AUTH_TOKEN_PATH=str(path))
    in_file = mode_of(address)
    user(RAY_AUTH_TOKEN_PATH="/nowhere", RAY_AUTH_TOKEN=token)
    in_environment = mode_of(address)

    assert (at_home, in_file, in_environment) == ("token", "token", "token")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "there is none here; put what `ray get-auth-token` prints on the cluster's head into ~/.ray/auth_token"),
        ({"RAY_AUTH_TOKEN": ""}, "there is none here"),
        ({"RAY_AUTH_TOKEN": "x"}, "the one in RAY_AUTH_TOKEN is another one"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "file cannot be opened or is empty: /nowhere"),
        ({"RAY_AUTH_TOKEN_PATH": __file__}, rf"the one in {__file__} \(RAY_AUTH_TOKEN_PATH\) is another one"),
        (
            {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"},
            "RAY_AUTH_MODE=disabled keeps this run from showing one",
        ),
    ],
)
def test_cluster_that_wants_another_token_is_told_with_what_is_wrong(guarded, user, variables, said):
    _, address, _ = guarded
    user(**variables)

    with pytest.raises(ConfigError, match=said) as refused:
        mode_of(address)

    assert str(refused.value).startswith(f"--ray-address {address}: that Ray cluster wants a token, and ")
    assert "\n" not in str(refused.value)


def test_run_without_the_token_is_refused_in_one_line_and_leaves_nothing(guarded, user, flags, tmp_path):
    _, address, _ = guarded
    save = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train_diffusion.py"), *flags("--ray-address", address, "--save", str(save))]

    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "wants a token, and there is none here" in done.stderr
    assert not save.exists()


@pytest.mark.long
def test_run_with_the_token_joins(guarded, user, flags, tmp_path):
    _, address, path = guarded
    user(RAY_AUTH_TOKEN_PATH=str(path))
    save = tmp_path / "run"
    more = ("--ray-address", address, "--num-rollout", "1", "--save", str(save))

    done = subprocess.run(
        [sys.executable, str(ROOT / "train_diffusion.py"), *flags(*more)], capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr
    assert "gcs_client" not in done.stderr  # no warning of Ray's core
    assert (save / "student").is_dir()
