"""The network and the Ray that a run names are looked at before it starts."""

import socket
import sys

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.preflight.rules import resolve


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """An earlier test may have imported it; then processes of the run may be on other machines."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)


@pytest.mark.parametrize("value", ["eth77", "lo,eth77", "eth77,lo"])
@pytest.mark.parametrize("more", [(), ("--local",)])
def test_interface_of_another_machine_is_refused_with_the_variable_and_what_is_here(refused, monkeypatch, value, more):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)

    said = refused("--device", "cpu", *more)

    assert said.startswith("GLOO_SOCKET_IFNAME=eth77: this machine has no such network interface; name one of ")
    assert socket.if_nameindex()[0][1] in said


@pytest.mark.parametrize("value", ["", "lo"])
def test_interface_of_this_machine_is_taken(asked, monkeypatch, value):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)

    assert resolve(parse_args([*asked, "--device", "cpu"])).args.device == "cpu"


@pytest.mark.parametrize("more", [("--ray-address", "192.0.2.1:6379"), ("--device", "cuda")])
def test_interface_that_nobody_here_will_use_is_not_looked_at(asked, monkeypatch, more):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")

    assert resolve(parse_args([*asked, *more])).args.dry_run


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--ray-address", "192.0.2.1:6379"), "and --ray-address 192.0.2.1:6379 joins one, which decides itself"),
        (("--ray-address", "auto"), "and --ray-address auto joins one, which decides itself"),
        (("--local",), "needs Ray, and --local runs everything in this process"),
    ],
)
def test_authentication_of_a_ray_that_the_run_does_not_start_is_refused(refused, more, said):
    assert said in refused("--ray-auth-mode", "disabled", *more)


def test_ray_authenticates_unless_it_is_told_not_to(asked):
    modes = [resolve(parse_args([*asked, *more])).args.ray_auth_mode for more in ((), ("--ray-auth-mode", "disabled"))]

    assert modes == ["token", "disabled"]
