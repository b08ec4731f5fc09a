"""Installation of the server's environment from the projects' files."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def project(path):
    return tomllib.loads((ROOT / path).read_text())["project"]


def test_the_server_is_an_extra_of_the_plugin_alone():
    """With miles-dmd's own requirements it cannot be installed: both pin diffusers, to different versions."""
    ours, plugin = project("pyproject.toml"), project("sglang_plugin/pyproject.toml")

    extras = ours["optional-dependencies"]

    assert not any(name.startswith("sglang") for names in (ours["dependencies"], *extras.values()) for name in names)
    assert plugin["optional-dependencies"] == {"sglang": ["sglang[diffusion]>=0.5.22"]}
    assert plugin["dependencies"] == []
