"""Real servers at the edges: of other encoders, tokenizers or precision, and on a port that was taken."""

import json
import shutil
import socket
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_dmd.engines.sglang import launch
from miles_dmd.errors import EngineRefused
from miles_dmd.modalities.diffusion.requests import DenoisingRequest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # servers that start beside each other on a busy machine

STEPS = 4
BF16 = 2**-8


def requests(*stop_steps):
    return [DenoisingRequest(7 + i, i % 10, 2**62 + i, stop) for i, stop in enumerate(stop_steps)]


# -- a server of another pipeline directory ---------------------------------------------------------------------------


def nudged(directory, component):
    """One bias of it is another by 1e-4: no picture would show it."""
    (path,) = (directory / component).glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(("final_layer_norm.bias", "final_layer_norm.weight")))
    save_file({**tensors, name: tensors[name] + 1e-4}, path)


def swapped(directory, component):
    """Two words have each other's number."""
    for path in (directory / component / "tokenizer.json", directory / component / "vocab.json"):
        content = json.loads(path.read_text())
        words = content["model"]["vocab"] if "model" in content else content
        words["seven</w>"], words["two</w>"] = words["two</w>"], words["seven</w>"]
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "component", "reason"),
    [
        (nudged, "text_encoder", "has another text_encoder than"),
        (nudged, "text_encoder_2", "has another text_encoder_2 than"),
        (nudged, "text_encoder_3", "has another text_encoder_3 than"),
        (swapped, "tokenizer", "encodes 'a handwritten (two|seven)' otherwise than the run"),
        (swapped, "tokenizer_2", "encodes 'a handwritten (two|seven)' otherwise than the run"),
    ],
)
def test_server_with_other_encoders_or_tokenizers_is_refused(
    open_engine, sglang_server, teacher, tmp_path, change, component, reason
):
    shutil.copytree(teacher, tmp_path / "mine")
    change(tmp_path / "mine", component)

    with pytest.raises(EngineRefused, match=rf"^{sglang_server.url} {reason}"):
        open_engine("sglang", "--sglang-url", sglang_server.url, "--hf-checkpoint", str(tmp_path / "mine"))


def test_server_of_an_equal_copy_is_taken(open_engine, sglang_server, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "copy")

    engine = open_engine("sglang", "--sglang-url", sglang_server.url, "--hf-checkpoint", str(tmp_path / "copy"))

    assert "differ" not in engine.notes[0]


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bf16_server(start_sglang):
    server = start_sglang("--compute-dtype", "bf16")
    server.wait()
    return server


def test_server_in_another_precision_is_refused_with_the_flags(open_engine, bf16_server):
    flags = "--dit-precision fp32 --text-encoder-precisions fp32 fp32 fp32"

    with pytest.raises(
        EngineRefused, match=rf"holds its network in bfloat16, and --compute-dtype is fp32: .* {flags}$"
    ):
        open_engine("sglang", "--sglang-url", bf16_server.url)


@pytest.mark.parametrize("solver", ["renoise", "euler"])
def test_engines_agree_in_bf16_as_far_as_bf16_agrees_with_fp32(open_engine, bf16_server, solver):
    """Both round each layer's output to 8 bits, in another order: apart by what rounding does, and no more."""
    asked = requests(*range(STEPS), *range(STEPS))
    exact = open_engine("inprocess", "--solver", solver).generate(asked)
    here = open_engine("inprocess", "--solver", solver, "--compute-dtype", "bf16").generate(asked)
    more = ("--sglang-url", bf16_server.url, "--solver", solver, "--compute-dtype", "bf16")

    there = open_engine("sglang", *more).generate(asked)

    rounding = apart(here, exact)
    print(f"{solver}: bf16 here against fp32 {rounding:.4f}, server against here {apart(there, here):.4f}")
    assert apart(there, here) < 2 * rounding
    assert apart(there, here) < 20 * BF16
    initial = torch.tensor([stop == 0 for stop in there.stop_steps])  # drawn in fp32, and rounded there
    torch.testing.assert_close(there.latents[initial], here.latents[initial], rtol=BF16, atol=BF16)


def apart(one, other):
    return float((one.clean - other.clean).norm() / other.clean.norm())


def test_bf16_server_takes_weights(open_engine, bf16_server):
    more = ("--compute-dtype", "bf16", "--verify-weights", "every")
    engine = open_engine("sglang", "--sglang-url", bf16_server.url, *more)
    before = engine.generate(requests(1))
    known = dict(open_engine("inprocess").model.network.named_parameters())

    engine.update_weights([{name: value.detach() * 1.05 for name, value in known.items()}], 1)

    assert apart(engine.generate(requests(1)), before) > BF16


# -- ports ------------------------------------------------------------------------------------------------------------


def test_server_whose_port_is_taken_is_started_on_another(start_sglang, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free, ports = launch.free_ports, []

        def first_a_taken_one(host):
            ports.append(free(host))
            return ports[-1]._replace(http=taken.getsockname()[1]) if len(ports) == 1 else ports[-1]

        monkeypatch.setattr(launch, "free_ports", first_a_taken_one)
        server = start_sglang()

        assert server.wait() == f"http://127.0.0.1:{ports[1].http}"
    server.close()


# -- layer-wise offload -----------------------------------------------------------------------------------------------

OFFLOADED = """
import json
from types import SimpleNamespace

from miles_dmd_sglang import without_cuda
without_cuda.prepare()
import torch
from miles_dmd_sglang.report import report
from sglang.multimodal_gen.runtime.managers.memory_managers import layerwise_offload


class Network(layerwise_offload.LayerwiseOffloadableModuleMixin, torch.nn.Module):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.block = torch.nn.Linear(4, 3, bias=False)
        self.block.weight.data = torch.empty((1,))
        self.out = torch.nn.Linear(3, 2, bias=False)
        weights = lambda: iter([("block.weight", torch.zeros(3, 4))])
        self.layerwise_offload_managers = [SimpleNamespace(enabled=True, iter_cpu_weights=weights)]


pipeline = SimpleNamespace(get_module=lambda name: Network(), stages=[])
found = report(SimpleNamespace(pipeline=pipeline, is_sleeping=lambda: False))
print("FOUND", json.dumps([found["parameters"], found["device"]]))
"""


def test_plugin_tells_the_shapes_of_what_is_offloaded_layer_by_layer(sglang_python):
    """The network itself holds placeholders of one number then."""
    ran = subprocess.run([sglang_python, "-c", OFFLOADED], capture_output=True, text=True, check=True)

    parameters, device = json.loads(ran.stdout.partition("FOUND ")[2])

    assert parameters == {"block.weight": [[3, 4], "torch.float32"], "out.weight": [[2, 3], "torch.float32"]}
    assert device == "cpu"
