"""Worker report over stock sglang's route POST /get_weights_checksum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_dmd_sglang import PROTOCOL, __version__, layouts
from miles_dmd_sglang.counters import COUNTERS

NAME = "miles_dmd:report"
"""Asked for as if it were a module; a server without this plugin answers that there is no such module."""


def around_checksum(original: Callable[..., Any], worker: Any, module_names: list[str] | None = None) -> Any:
    if module_names and NAME in module_names:
        return {NAME: report(worker)}
    return original(worker, module_names)


def report(worker: Any) -> dict[str, Any]:
    from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import iter_materialized_weights
    from sglang.multimodal_gen.runtime.platforms import current_platform
    from sglang.version import __version__ as sglang_version

    network = worker.pipeline.get_module("transformer")
    # under layer-wise offload the network itself holds placeholders of one number
    parameters = {} if network is None else dict(iter_materialized_weights(network))
    return {
        "protocol": PROTOCOL,
        "plugin": __version__,
        "sglang": sglang_version,
        "pipeline": type(worker.pipeline).__name__,
        "device": current_platform.device_type,  # not a parameter's, which may be offloaded meanwhile
        "cannot_stop": cannot_stop(worker.pipeline),
        "asleep": bool(worker.is_sleeping()),
        "counters": dict(COUNTERS),
        "parameters": {name: [list(value.shape), str(value.dtype)] for name, value in parameters.items()},
    }


def cannot_stop(pipeline: Any) -> str:
    """Reason why this pipeline cannot stop at a step; empty where it can."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import DecodingStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    if missing := sorted(set(layouts.find().targets) - HookRegistry._patched):
        return f"this sglang has no {missing[0]}"
    stages = list(pipeline.stages)
    for kind, method in ((DenoisingStage, "_run_denoising_step"), (DecodingStage, "forward")):
        found = [stage for stage in stages if isinstance(stage, kind)]
        if not found:
            return f"{type(pipeline).__name__} has no {kind.__name__}"
        if any(getattr(type(stage), method) is not getattr(kind, method) for stage in found):
            return f"{type(pipeline).__name__} has a {kind.__name__} of its own"
    return ""
