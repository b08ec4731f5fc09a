"""One Ray cluster and one SGLang server for all tests of a session: their starts cost ten and forty seconds."""

import os
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="session")
def faults(tmp_path_factory):
    """Directory of orders for the plug-ins of ``plugins/faulty``; processes started after this find both."""
    directory = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGINS)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")])))
        patch.setenv("FAULTS", str(directory))
        yield directory


@pytest.fixture(scope="session")
def ray_cluster(faults, tmp_path_factory):
    """Four logical CPUs, whatever this machine has: ranks take turns here anyway. It wants a token, as ours do."""
    from miles_dmd.cluster.supervision.authentication import (
        own_authentication,  # first: its package sets what Ray reads
    )

    import ray  # isort: skip

    with own_authentication("token", tmp_path_factory.mktemp("ray")):
        ray.init(
            address="local", num_cpus=4, num_gpus=0, include_dashboard=False, _node_ip_address="127.0.0.1",
            object_store_memory=200 << 20, log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        yield
        ray.shutdown()


SGLANG_VENV = Path(__file__).parents[2] / ".sglang-venv"


@pytest.fixture(scope="session")
def sglang_python():
    """Python of an environment with a real SGLang server; CI must have one."""
    python = os.environ.get("MILES_DMD_SGLANG_PYTHON") or str(SGLANG_VENV / "bin" / "python")
    if os.access(python, os.X_OK):
        return python
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs an SGLang server, and there is none at {python}; scripts/setup_sglang_cpu.sh builds it")
    pytest.skip(f"no SGLang server at {python}; build one with scripts/setup_sglang_cpu.sh")


@pytest.fixture(scope="session")
def start_sglang(sglang_python, make_args, tmp_path_factory):
    """``start_sglang("--hf-checkpoint", ...)``: a server that starts; ``wait()`` for it. All end with the session."""
    from miles_dmd.engines.sglang.launch import serve

    servers = []

    def start(*more, **env):
        logs = ("--sglang-log-dir", str(tmp_path_factory.mktemp("sglang")))
        args = make_args("--rollout-engine", "sglang", "--sglang-python", sglang_python, *logs, *more)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            servers.append(serve(args, device="cpu", number=len(servers), host="127.0.0.1"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def sglang_server(start_sglang):
    """One server of the digits teacher, with our plugin, shared by all tests of a session: 40 s to start."""
    server = start_sglang()
    server.wait()
    return server


@pytest.fixture(scope="session")
def open_engine(make_args, digit_prompts):
    """``open_engine("sglang", "--sglang-url", ...)``: an engine on the digits' prompts."""
    from miles_dmd import registry
    from miles_dmd.modalities.diffusion.conditions import PromptTable
    from miles_dmd.modalities.diffusion.encoding import ensure_table
    from miles_dmd.prompts import PromptSource
    from miles_dmd.training.compute import choose_compute

    def build(name, *more):
        args = make_args("--rollout-engine", name, *more)
        texts = PromptSource(args.prompt_data, args.seed).texts
        compute = choose_compute("cpu", "fp32")
        table = PromptTable(ensure_table(args, texts, compute.device))
        make = registry.resolve(registry.load("engines", name).builds["diffusion"])
        return make(args, compute=compute, prompts=table, texts=texts, servers=())

    return build
