"""Checkpoints of other kinds, named for what they are, with what to do, by a dry run as by a run."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2214\n"


def renamed(source, target):
    return lambda copy: (copy / source).rename(copy / target)


def replaced(name, content):
    def spoil(copy):
        (copy / name).write_bytes(content)

    return spoil


def rekeyed(component, new):
    """The tensors of a component by other names; those named "" are left out."""

    def spoil(copy):
        path = next((copy / component).glob("*.safetensors"))
        tensors = {new(name): value.clone() for name, value in load_file(path).items()}
        tensors.pop("", None)
        save_file(tensors, path)

    return spoil


def in_json(name, **changes):
    def spoil(copy):
        path = copy / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def sharded(copy, *, variant="", index=True):
    path = copy / TRANSFORMER
    tensors = load_file(path)
    path.unlink()
    dot = f".{variant}" if variant else ""
    name = f"diffusion_pytorch_model{dot}-00001-of-00001.safetensors"
    save_file(tensors, path.parent / name)
    if index:
        entries = {"weight_map": dict.fromkeys(tensors, name)}
        index_name = f"diffusion_pytorch_model.safetensors.index{dot}.json"
        (path.parent / index_name).write_text(json.dumps(entries))


def one_wrong_name(copy):
    """As many parameters, and one of them by a name that the network does not know."""
    rekeyed("transformer", lambda name: name.replace("proj_out.weight", "proj_out.kernel"))(copy)


WHOLE = {
    "variant": (renamed(TRANSFORMER, "transformer/diffusion_pytorch_model.fp16.safetensors"),
                ["weights of the variant fp16 only", 'variant="fp16"', "save_pretrained(NEW)"]),
    "variant of an encoder": (renamed("text_encoder_3/model.safetensors", "text_encoder_3/model.fp16.safetensors"),
                              ["text_encoder_3 has weights of the variant fp16 only"]),
    "variant of the vae": (renamed("vae/diffusion_pytorch_model.safetensors",
                                   "vae/diffusion_pytorch_model.bf16.safetensors"),
                           ["vae has weights of the variant bf16 only"]),
    "variant in shards": (lambda copy: sharded(copy, variant="fp16"), ["of the variant fp16 only", 'variant="fp16"']),
    "shards without index": (lambda copy: sharded(copy, index=False), ["or its index; download it completely"]),
    "pickle": (renamed(TRANSFORMER, "transformer/diffusion_pytorch_model.bin"),
               ["diffusion_pytorch_model.bin, a pickle", "write one"]),
    "pickle of an encoder": (renamed("text_encoder/model.safetensors", "text_encoder/pytorch_model.bin"),
                             ["pytorch_model.bin, a pickle"]),
    "gguf in a component": (renamed(TRANSFORMER, "transformer/sd3.gguf"), ["sd3.gguf, a GGUF file", "quantised"]),
    "other framework": (renamed(TRANSFORMER, "transformer/diffusion_flax_model.msgpack"), ["of another framework"]),
    "compiled": (rekeyed("transformer", "_orig_mod.{}".format), ["its keys hold _orig_mod.", "torch.compile"]),
    "parallel": (rekeyed("transformer", "module.{}".format), ["its keys hold module.", "DistributedDataParallel"]),
    "both": (rekeyed("transformer", "module._orig_mod.{}".format), ["its keys hold _orig_mod."]),
    "blocks compiled": (rekeyed("transformer", lambda name: name.replace("blocks.0.", "blocks.0._orig_mod.")),
                        ["its keys hold _orig_mod."]),
    "encoder compiled": (rekeyed("text_encoder_3", "_orig_mod.{}".format),
                         ["text_encoder_3", "its keys hold _orig_mod."]),
    "vae parallel": (rekeyed("vae", "module.{}".format), ["vae", "its keys hold module."]),
    "single file inside": (rekeyed("transformer", "model.diffusion_model.{}".format),
                           ["layout of a single-file checkpoint"]),
    "adapter inside": (rekeyed("transformer", lambda name: name.replace(".weight", ".lora_A.weight")),
                       ["it is an adapter (LoRA)"]),
    "one wrong name": (one_wrong_name, ["have no proj_out.weight", "(1 more of 84 differ)", "download both"]),
    "a layer too few": (rekeyed("text_encoder", lambda name: "" if "layers.0.mlp" in name else name),
                        ["text_encoder have no text_model.encoder.layers.0.mlp.fc1.weight (3 more"]),
    "no words": (rekeyed("text_encoder", lambda name: "" if "token_embedding" in name else name),
                 ["text_encoder", "no text_model.embeddings.token_embedding.weight"]),
    "no positions": (rekeyed("text_encoder_2", lambda name: "" if "position_embedding" in name else name),
                     ["text_encoder_2", "no text_model.embeddings.position_embedding.weight"]),
    "no distances": (rekeyed("text_encoder_3", lambda name: "" if "relative" in name else name),
                     ["text_encoder_3", "relative_attention_bias.weight"]),
    "no last norm of the decoder": (rekeyed("vae", lambda name: "" if "decoder.conv_norm_out" in name else name),
                                    ["vae", "no decoder.conv_norm_out.weight"]),
    "a layer of T5 too few": (rekeyed("text_encoder_3", lambda name: "" if "block.1." in name else name),
                              ["text_encoder_3 have no encoder.block.1.layer.0.SelfAttention.q.weight"]),
    "pointer": (replaced(TRANSFORMER, POINTER.encode()), [f"{TRANSFORMER} is a Git LFS pointer", "git lfs pull"]),
    "pointer of an encoder": (replaced("text_encoder_2/model.safetensors", POINTER.encode()),
                              ["text_encoder_2/model.safetensors is a Git LFS pointer"]),
    "pointer of a vocabulary": (replaced("tokenizer/tokenizer.json", POINTER.encode()),
                                ["tokenizer/tokenizer.json is a Git LFS pointer"]),
    "pointer of sentencepiece": (replaced("tokenizer_3/spiece.model", POINTER.encode()),
                                 ["spiece.model is a Git LFS pointer"]),
    "pointer of a configuration": (replaced("vae/config.json", POINTER.encode()),
                                   ["vae/config.json is a Git LFS pointer"]),
    "own code": (in_json("transformer/config.json", auto_map={"AutoModel": "evil.Evil"}),
                 ["transformer/config.json names code of its own (auto_map)"]),
    "own code of a tokenizer": (in_json("tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}),
                                ["tokenizer/tokenizer_config.json names code of its own"]),
    "own library": (in_json("model_index.json", vae=["my_lab.vae", "AutoencoderKL"]),
                    ["takes vae from the library 'my_lab.vae'", "diffusers and transformers"]),
    "own library of what is not needed": (in_json("model_index.json", watermark=["my_lab", "Mark"]),
                                          ["takes watermark from the library 'my_lab'"]),
    "own pipeline": (in_json("model_index.json", _class_name=["pipeline", "MyPipeline"]), ["not a StableDiffusion3"]),
    "longer than its positions": (in_json("tokenizer/tokenizer_config.json", model_max_length=77),
                                  ["model_max_length 77 is more than the max_position_embeddings of text_encoder, 12"]),
}  # fmt: skip


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(("spoil", "parts"), WHOLE.values(), ids=WHOLE)
def test_a_pipeline_of_another_kind_is_named(run, tmp_path, teacher, flags, spoil, parts, dry):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    spoil(copy)

    code, lines, written = run(*flags("--hf-checkpoint", str(copy), *dry), whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"--hf-checkpoint {copy}: ", *parts)), lines[0]


def beside(name, content=b""):
    def make(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return folder

    return make


def file(name, content=b""):
    return lambda folder: beside(name, content)(folder) / name


PLACES = {
    "safetensors": (file("sd3.safetensors"), ["is a single-file checkpoint", "from_single_file"]),
    "ckpt": (file("sd3.ckpt"), ["is a single-file checkpoint, and a pickle", "from_single_file"]),
    "gguf": (file("sd3.gguf"), ["is a GGUF file", "quantised", "model_index.json"]),
    "pickle": (file("pytorch_model.bin"), ["is a pickle"]),
    "pointer": (file("sd3.safetensors", POINTER.encode()), ["is a Git LFS pointer", "git lfs pull"]),
    "index": (file("model_index.json", b"{}"), ["is a file; name the pipeline's folder"]),
    "folder of a single file": (beside("sd3.safetensors"), ["no model_index.json", "sd3.safetensors", "from_single"]),
    "folder of a gguf": (beside("sd3.gguf"), ["no model_index.json", "holds sd3.gguf, which is a GGUF file"]),
    "adapter": (beside("adapter_config.json"), ["is a LoRA adapter", "fuse_lora"]),
    "diffusers' adapter": (beside("pytorch_lora_weights.safetensors"), ["is a LoRA adapter"]),
    "the hub's cache": (beside("snapshots/4d7a/model_index.json"), ["hub's cache", "snapshots/4d7a"]),
    "empty": (beside("x.txt"), ["is not a diffusers pipeline (no model_index.json)"]),
}


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--teacher-checkpoint"])
@pytest.mark.parametrize(("make", "parts"), PLACES.values(), ids=PLACES)
def test_what_is_no_pipeline_directory_is_named(run, tmp_path, flags, make, parts, flag):
    (tmp_path / "given").mkdir()
    given = make(tmp_path / "given")

    code, lines, written = run(*flags(flag, str(given), "--dry-run"), whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"{flag} {given}: ", *parts)), lines[0]


def test_a_component_of_a_pipeline_is_named(run, flags, teacher):
    code, lines, _ = run(*flags("--hf-checkpoint", str(teacher / "transformer")), whole=False)

    assert (code, len(lines)) == (2, 1)
    assert (
        f"is one component of a pipeline; name the pipeline's folder, the one with model_index.json: {teacher}"
        in (lines[0])
    )


def test_weights_in_shards_are_read(run, tmp_path, teacher, flags):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    sharded(copy)

    code, lines, _ = run(*flags("--hf-checkpoint", str(copy), "--dry-run"), whole=False)

    assert (code, lines) == (0, [])
