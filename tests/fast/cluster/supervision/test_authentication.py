"""The token of a run's own Ray, and what of the environment it leaves as it was."""

import os

import pytest

from miles_dmd.cluster.supervision import authentication, session
from miles_dmd.cluster.supervision.authentication import own_authentication
from miles_dmd.errors import ConfigError

OF_THE_USER = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "hers", "RAY_AUTH_TOKEN_PATH": "/hers"}


@pytest.fixture(params=[{}, OF_THE_USER], ids=["nothing set", "all set"])
def environment(request, monkeypatch):
    """Variables that Ray reads, set by the user."""
    for name in OF_THE_USER:
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    return request.param


def of_ray():
    return {name: os.environ[name] for name in OF_THE_USER if name in os.environ}


def test_own_token_is_fresh_and_for_its_owner_alone_and_the_users_comes_back(environment, tmp_path):
    tokens = []

    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        with own_authentication("token", tmp_path / run):
            file = tmp_path / run / "auth_token"
            tokens.append(file.read_text())
            assert of_ray() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
            assert file.stat().st_mode & 0o777 == 0o600

    assert of_ray() == environment
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) == 64


def test_ray_in_this_process_reads_the_mode_anew(environment, tmp_path):
    from ray._raylet import AuthenticationTokenLoader, get_authentication_mode

    with own_authentication("token", tmp_path):
        inside = int(get_authentication_mode())
        token = AuthenticationTokenLoader.instance().get_raw_token()

    assert (inside, int(get_authentication_mode())) == (1, 0)
    assert token == (tmp_path / "auth_token").read_text()


def test_disabled_makes_no_token(environment, tmp_path):
    with own_authentication("disabled", tmp_path):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"

    assert of_ray() == environment
    assert list(tmp_path.iterdir()) == []


def test_ray_without_token_authentication_is_refused_with_the_flag_and_what_it_costs(monkeypatch, tmp_path):
    monkeypatch.setattr(authentication, "_is_built_in", lambda: False)

    with pytest.raises(ConfigError) as refused, own_authentication("token", tmp_path):
        pass
    with own_authentication("disabled", tmp_path):
        pass

    assert "--ray-auth-mode token: Ray 2." in str(refused.value)
    assert "or pass --ray-auth-mode disabled: then every user of this machine can run code as you" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("usual", "expected"),
    [
        ("/tmp", None),
        ("/var/tmp", None),
        ("/tmp/é", "/tmp"),
        ("/tmp/a b", "/tmp"),
        ("/a/long/path/to/a/folder", "/tmp"),
    ],
)
def test_ray_gets_a_temporary_folder_that_it_can_use(monkeypatch, usual, expected):
    monkeypatch.setattr("tempfile.tempdir", usual)

    assert session._root() == expected
