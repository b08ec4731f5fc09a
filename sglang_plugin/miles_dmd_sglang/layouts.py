"""Import paths of what the plugin wraps, by release of sglang."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

_RUNTIME = "sglang.multimodal_gen.runtime"


@dataclass(frozen=True)
class Layout:
    name: str
    step: str
    """The solver's step; its parameters include ``model_output``, ``sample`` and ``current_sigma``."""
    prepare: str = f"{_RUNTIME}.pipelines_core.stages.denoising.DenoisingStage._prepare_denoising_loop"
    forward: str = f"{_RUNTIME}.pipelines_core.stages.denoising.DenoisingStage._predict_noise"
    decode: str = f"{_RUNTIME}.pipelines_core.stages.decoding.DecodingStage.forward"
    checksum: str = (
        f"{_RUNTIME}.post_training.gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin.get_weights_checksum"
    )
    from_tensor: str = f"{_RUNTIME}.post_training.weights_updater.WeightsUpdater.update_weights_from_tensor"
    from_disk: str = f"{_RUNTIME}.post_training.weights_updater.WeightsUpdater.update_weights_from_disk"

    @property
    def noise(self) -> str:
        """Draws of the step."""
        return f"{self.step.rpartition('.')[0]}._rollout_variance_noise"

    @property
    def targets(self) -> tuple[str, ...]:
        stopping = (self.step, self.noise, self.prepare, self.forward, self.decode)
        return *stopping, self.checksum, self.from_tensor, self.from_disk


CONTROLLER = Layout(
    "0.5.23", f"{_RUNTIME}.post_training.flow_rollout_controller.FlowRolloutController.flow_sde_sampling"
)
SCHEDULER = Layout("0.5.22", f"{_RUNTIME}.post_training.scheduler_rl_mixin.SchedulerRLMixin.flow_sde_sampling")


def find() -> Layout:
    """The layout of the installed release. Raises RuntimeError for one that is not known."""
    for layout in (CONTROLLER, SCHEDULER):
        if find_spec(layout.step.rsplit(".", 2)[0]) is not None:
            return layout
    raise RuntimeError(
        "miles_dmd: this release of sglang keeps its rollout code elsewhere; 0.5.22 and 0.5.23 are known"
    )
