"""An SGLang server in ten routes: its network is v = scale * x, and it can be told to lie, to fail and to die. And the
engine over several of them."""

import base64
import hashlib
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgpack
import torch
from safetensors.torch import save

from miles_dmd.client import Client
from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.sampler import SGLangEngine
from miles_dmd.engines.sglang.weights import digest
from miles_dmd.engines.sglang.wire import Sampling
from miles_dmd.modalities.diffusion.requests import DenoisingRequest

SIGMAS, SHAPE = (1.0, 0.9, 0.75, 0.5), (2, 3, 3)


def packed(value):
    value = torch.as_tensor(value)
    return {"__tensor__": True, "data": save({"t": value.contiguous()}), "shape": list(value.shape)}


class FakeServer:
    def __init__(
        self, *, version="0.5.23", pipeline="StableDiffusion3Pipeline", plugin=True, protocol=1, seed_shift=0,
        asleep=False,
    ):  # fmt: skip
        self.version, self.pipeline, self.plugin, self.protocol = version, pipeline, plugin, protocol
        self.seed_shift = seed_shift
        self.asked = []
        self.broken = {}
        """path -> status that it answers with."""
        self.failing = {}
        """path (or all) -> answers that come first, in turn; an exception is raised."""
        self.hung = set()
        """Paths that it does not answer in time."""
        self.after = {}
        """path -> a call made when it has done what it was asked; an exception that it gives is its answer."""
        self.down = self.insomniac = self.deaf = False
        """Dead; says that it sleeps and does not; drops the weights that it is sent."""
        self.dtype, self.shape, self.tp_size, self.cannot_stop = "torch.float32", [1], 1, ""
        self.counts = True
        """Whether it counts weight updates."""
        self.waited = []
        """Seconds that it was given to answer each request."""
        self.restart()
        self.asleep = asleep

    def restart(self):
        self.down, self.asleep, self.updates = False, False, 0
        self.scale = torch.ones(1)

    def __call__(self, request):
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.asked.append(path)
        if self.down:
            raise httpx.ConnectError("refused") from ConnectionRefusedError()
        for failing in (self.failing.get(path), self.failing.get("all")):
            if failing:
                failure = failing.pop(0)
                if isinstance(failure, Exception):
                    raise failure
                return failure
        self.waited.append(request.extensions["timeout"]["read"])
        if path in self.hung or "all" in self.hung:
            raise httpx.ReadTimeout("late")
        if path in self.broken:
            return httpx.Response(self.broken[path], text="broken")
        if path == "/rollout/generate" and self.asleep:
            return httpx.Response(500, text="Server is sleeping")
        if path == "/rollout/generate":
            return httpx.Response(200, content=msgpack.packb([self.generate(body)]))
        answer = getattr(self, path.strip("/"))(body)
        if error := self.after.get(path, lambda: None)():
            raise error
        return httpx.Response(200, json=answer)

    def health(self, body):
        return {"status": "ok"}

    def server_info(self, body):
        return {"version": self.version, "tp_size": self.tp_size}

    def model_info(self, body):
        return {"architectures": [self.pipeline]}

    def get_weights_checksum(self, body):
        (name,) = body["module_names"]
        if name == "transformer":
            return {name: hashlib.sha256(b"scale" + self.scale.numpy().tobytes()).hexdigest()}
        report = {
            "protocol": self.protocol, "plugin": "0.1.0", "cannot_stop": self.cannot_stop, "device": "cpu",
            "asleep": self.asleep, "counters": {"forwards": 0, "updates": self.updates},
            "parameters": {"scale": [self.shape, self.dtype]},
        }  # fmt: skip
        return {name: report if self.plugin else "not_found"}

    def update_weights_from_tensor(self, body):
        for name, value in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])):
            if name == "scale" and not self.deaf:
                self.scale = value
        self.updates += self.counts
        return {"success": True}

    def update_weights_from_tensor_checker(self, body):
        same = body["expected_named_tensors_sha256"] == {"scale": digest(self.scale)}
        return {"success": same, "message": "checksum mismatch"}

    def release_memory_occupation(self, body):
        self.asleep = not self.insomniac
        return {"success": True}

    def resume_memory_occupation(self, body):
        self.asleep = False
        return {"success": True}

    def generate(self, body):
        stop = body["extra_sampling_params"].get("diffusers_kwargs", {}).get("miles_dmd_stop_step")
        step = stop if stop is not None else body["rollout_return_step_indices"][0]
        own = torch.Generator().manual_seed(body["seed"] + self.seed_shift)
        states, outputs = [torch.randn(SHAPE, generator=own)], []
        for sigma, to in zip(SIGMAS, (*SIGMAS[1:], 0.0), strict=True):
            outputs.append(self.scale * states[-1])
            clean = states[-1] - sigma * outputs[-1]
            states.append((1 - to) * clean + to * torch.randn(SHAPE, generator=own))
        answer = {"prompt": body["prompt"], "seed": body["seed"]}
        kept, labels = [states[step]], [SIGMAS[step] * 1000]
        if stop is None:
            answer["rollout_debug_tensors"] = {"rollout_model_outputs": packed(torch.stack(outputs))}
        else:
            kept, labels = [*kept, states[step] - SIGMAS[step] * outputs[step]], [*labels, 0.0]
            answer["generated_output"] = packed(torch.tensor([1, step, step + 1, self.updates]))
        trajectory = {"latents": torch.stack(kept), "timesteps": labels, "sigmas": [*SIGMAS, 0.0]}
        return {**answer, "dit_trajectory": {name: packed(value) for name, value in trajectory.items()}}


SAMPLING = Sampling(
    sigmas=SIGMAS, solver="renoise", height=64, width=64, shape=SHAPE, text_length=None, grid_cure="start it otherwise"
)


def no_encoders(client, capabilities, patience):
    """This server has none to compare."""


def engine_of(*servers, checkpoint="", cache_dir="/nowhere", require_encoders=no_encoders, **options):
    urls = [f"http://{name}" for name in "abc"]
    options = Options(**{"verify_weights": "off", "sglang_deadline": 0.0, "sglang_url": urls, **options})
    clients = [
        Client(
            url, timeout=600.0, deadline=options.sglang_deadline, connections=2,
            transport=httpx.MockTransport(server), managed=not options.sglang_url,
        )
        for url, server in zip(urls, servers, strict=False)
    ]  # fmt: skip
    args = SimpleNamespace(
        engine_options=options, model_family="sd3", compute_dtype="fp32", seed=0, hf_checkpoint=checkpoint,
        pipeline_directory=Path(checkpoint),
        cache_dir=cache_dir,
    )  # fmt: skip
    return SGLangEngine(args, clients, ["a cat", "a dog"], SAMPLING, require_encoders)


def requests(*stop_steps):
    return [DenoisingRequest(i, i % 2, 2**62 + i, stop) for i, stop in enumerate(stop_steps)]


def new(scale):
    return [{"scale": torch.tensor([scale])}]
