"""A language-model server in twelve routes, with the deaths of the real one, and the engine over several of them."""

import base64
import hashlib
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import httpx
import torch
from safetensors.torch import load_file, save_file

from miles_dmd.client import Client
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.language.sampler import TokenEngine

VOCABULARY, END = 70, 69
PROMPTS = [[1, 2, 3], [4, 5]]
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weights(scale=1.0):
    """A checkpoint's tensors."""
    own = torch.Generator().manual_seed(0)
    layer = {f"model.layers.0.self_attn.{x}_proj.weight": (4, 4) for x in "qkv"}
    layer |= {f"model.layers.0.mlp.{x}_proj.weight": (8, 4) for x in ("gate", "up")}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, 4), **layer, "model.norm.weight": (4,)}
    return {name: scale * torch.randn(shape, generator=own) for name, shape in shapes.items()}


class FakeLanguageServer:
    def __init__(self, **info):
        self.info = {
            "version": "0.5.23", "device": "cpu", "dtype": "float32", "tp_size": 1, "max_req_input_len": 100, **info
        }  # fmt: skip
        self.asked, self.down, self.broken, self.plugin, self.seeds, self.end = [], False, {}, True, True, END
        self.deaf = self.busy = False
        """Drops what it is sent; has a request under way that nobody waits for."""
        self.restart()

    def restart(self):
        self.down, self.asleep, self.session, self.tag, self.held = False, False, False, "default", weights()
        self.draws = 0

    def die(self):
        self.down = True
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    def __call__(self, request):
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.asked.append(path)
        if self.down:
            raise httpx.ConnectError("refused") from ConnectionRefusedError()
        if path in self.broken:
            return httpx.Response(self.broken[path], text="broken")
        return getattr(self, path.strip("/"))(body)

    def health(self, body):
        return httpx.Response(200)

    def server_info(self, body):
        return httpx.Response(200, json=self.info)

    def model_info(self, body):
        return httpx.Response(200, json={"is_generation": True, "weight_version": self.tag})

    def update_weight_version(self, body):
        self.tag = body["new_version"]
        return success(True)

    def begin_weight_update(self, body):
        if self.session:
            return success(False, "a weight-update session is already open")
        self.session = True
        return success(True)

    def end_weight_update(self, body):
        self.session = False
        return success(True)

    def update_weights_from_tensor(self, body):
        assert self.session
        self.load(dict(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))))
        return success(True)

    def update_weights_from_disk(self, body):
        for path in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.load(load_file(path))
        return success(True)

    def load(self, tensors):
        for name, value in tensors.items():
            if name in self.held and self.held[name].shape != value.shape:
                self.die()
            if name in self.held and not self.deaf:
                self.held[name] = value

    def flush_cache(self, body):
        return httpx.Response(400 if self.busy else 200, text="Cache flushed.")

    def weights_checker(self, body):
        digits = 64 if self.plugin else 16
        told = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:digits] for name, value in self.own()}
        return httpx.Response(200, json={"success": True, "ranks": [{"checksums": told}]})

    def own(self):
        """Names and tensors as SGLang holds them."""
        for name, value in self.held.items():
            whole = next((whole for whole, parts in STACKED.items() if parts[0] in name), None)
            if whole:
                parts = [name.replace(STACKED[whole][0], part) for part in STACKED[whole]]
                yield name.replace(STACKED[whole][0], whole), torch.cat([self.held[part] for part in parts])
            elif not any(part in name for parts in STACKED.values() for part in parts):
                rows = -len(value) % 64 if "embed" in name else 0
                yield name, torch.cat([value, value.new_zeros(rows, *value.shape[1:])])

    def release_memory_occupation(self, body):
        if self.busy:
            self.die()
        self.asleep = True
        return httpx.Response(200, json=None)

    def resume_memory_occupation(self, body):
        if not self.asleep:
            self.die()
        self.asleep = False
        return httpx.Response(200, json=None)

    def generate(self, body):
        assert not self.asleep
        parameters = body["sampling_params"]
        self.draws += 1
        seed = parameters["sampling_seed"] if self.seeds else self.draws
        tokens = [(seed + i) % END for i in range(parameters["max_new_tokens"])]
        if seed % 2:
            tokens = [*tokens[:2], self.end]
        score = -float(self.held["model.norm.weight"].abs().sum())
        meta = {
            "finish_reason": {"type": "stop" if seed % 2 else "length"}, "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.tag, "weight_versions": [{"version": self.tag, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[score, token, None] for token in tokens],
        }  # fmt: skip
        return httpx.Response(200, json={"output_ids": tokens, "meta_info": meta})


def success(done, message=""):
    return httpx.Response(200 if done else 400, json={"success": done, "message": message})


def engine_of(directory, *servers, max_new_tokens=6, **options):
    save_file(weights(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    urls = tuple(f"http://{name}" for name in "abc"[: len(servers)])
    options = Options(**{"sglang_deadline": 0.0, "sglang_url": urls, **options})
    clients = [
        Client(url, timeout=60.0, deadline=0.0, connections=2, transport=httpx.MockTransport(server))
        for url, server in zip(urls, servers, strict=True)
    ]
    args = SimpleNamespace(
        engine_options=options, compute_dtype="fp32", seed=0, cache_dir=directory / "cache",
        pipeline_directory=directory,
    )  # fmt: skip
    return TokenEngine(args, clients, PROMPTS, directory=directory, end_ids=(END,), max_new_tokens=max_new_tokens)


def requests(*seeds):
    return [RolloutRequest(7 + i, i % 2, seed) for i, seed in enumerate(seeds)]


def buckets(scale):
    """An update in two buckets, which part what the server holds as one."""
    items = list(weights(scale).items())
    return [dict(items[:2]), dict(items[2:])]
