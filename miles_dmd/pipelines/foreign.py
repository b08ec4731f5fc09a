"""Checkpoints of other kinds, by name: single files, variants, pickles, Git LFS pointers, wrapped keys, adapters."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from miles_dmd.inputs import is_file, is_folder

POINTER = b"version https://git-lfs.github.com/spec/"
_VARIANT = re.compile(r"\.(\w+?)(-\d{5}-of-\d{5})?\.safetensors$|\.safetensors\.index\.(\w+)\.json$")
_SINGLE = {
    ".safetensors": "a single-file checkpoint",
    ".sft": "a single-file checkpoint",
    ".ckpt": "a single-file checkpoint, and a pickle, which runs what it says when it is read",
    ".pt": "a pickle, which runs what it says when it is read",
    ".pth": "a pickle, which runs what it says when it is read",
    ".bin": "a pickle, which runs what it says when it is read",
    ".gguf": "a GGUF file, whose weights are quantised",
}
_FRAMEWORKS = (".msgpack", ".h5", ".onnx")
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
_ADAPTERS = ("lora_", "lokr_", "hada_", ".alpha")
FOLDER = "name the pipeline's folder, the one with model_index.json"


def is_pointer(path: Path) -> bool:
    """True if Git has left a pointer in place of a large file (Git LFS)."""
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except OSError:
        return False


def pointer(path: Path) -> str:
    return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` there, or `hf download` it"


def no_pipeline(path: Path, pipeline: str) -> str:
    """Message: what lies at ``path`` in place of a pipeline directory, and the cure."""
    if is_file(path):
        return _of_file(path, pipeline)
    if snapshots := sorted(path.glob("snapshots/*/model_index.json")):
        return f"is a folder of the hub's cache; name the snapshot in it, {snapshots[-1].parent}"
    if is_file(path.parent / "model_index.json") and is_file(path / "config.json"):
        return f"is one component of a pipeline; {FOLDER}: {path.parent}"
    if is_file(path / "adapter_config.json") or any(path.glob("*lora*.safetensors")):
        return f"is a LoRA adapter, not a model; fuse it into its pipeline ({pipeline}.fuse_lora), save and name that"
    if single := sorted(entry for entry in path.iterdir() if entry.suffix in _SINGLE):
        what = f"it holds {single[0].name}, which {_of_file(single[0], pipeline)}"
        return f"is not a diffusers pipeline (no model_index.json): {what}"
    return "is not a diffusers pipeline (no model_index.json); name the folder that save_pretrained wrote"


def _of_file(path: Path, pipeline: str) -> str:
    if is_pointer(path):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` there, or `hf download` the pipeline"
    if path.suffix == ".gguf":
        return f"is {_SINGLE[path.suffix]}; {FOLDER} from which it was made"
    if path.suffix in _SINGLE:
        return (
            f"is {_SINGLE[path.suffix]}; make a pipeline of it, {pipeline}.from_single_file(FILE).save_pretrained(DIR)"
            ", and name DIR"
        )
    if path.name == "model_index.json":
        return f"is a file; {FOLDER}: {path.parent}"
    return f"is a file; {FOLDER}"


def other_weights(component: Path, wanted: str, pipeline: str) -> str:
    """Weights that a component has in place of ``wanted``, which are read; empty where it has nothing."""
    if not is_folder(component):
        return ""
    names = sorted(path.name for path in component.iterdir())
    found = [name for name in names if Path(name).suffix in _SINGLE or _VARIANT.search(name)]
    found += [name for name in names if Path(name).suffix in _FRAMEWORKS]
    if not found:
        return ""
    write = f"{pipeline}.from_pretrained(DIR{{}}).save_pretrained(NEW), and name NEW"
    if variants := [(match[1] or match[3], name) for name in found if (match := _VARIANT.search(name))]:
        variant, name = variants[0]
        how = write.format(f', variant="{variant}"')
        return f"{component} has weights of the variant {variant} only ({name}), and {wanted} is read; write it: {how}"
    if found[0].endswith(".safetensors"):
        return f"{component} has {found[0]}, and lacks {wanted} or its index; download it completely"
    kind = _SINGLE.get(Path(found[0]).suffix, "of another framework")
    return f"{component} has no {wanted}, but {found[0]}, {kind}; write one: {write.format('')}"


def other_names(found: Collection[str], wanted: Collection[str]) -> str:
    """Reason why none of the tensors ``wanted`` is among those ``found`` by name; empty where nothing tells."""
    for wrapper, who in _WRAPPERS.items():
        if any(wrapper in name.split(".") and _unwrapped(name) in wanted for name in found):
            return (
                f"its keys hold {wrapper}., as {who} saves them; take that out of every key, or save the module inside "
                "again"
            )
    if any(mark in name for name in found for mark in _ADAPTERS):
        return "it is an adapter (LoRA), not the whole network; fuse it into its network and save that"
    if any(name.startswith(("model.diffusion_model.", "joint_blocks.")) for name in found):
        return "it has the layout of a single-file checkpoint; read it with from_single_file and save that pipeline"
    return ""


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
