"""Plugin entry point: which function of sglang is wrapped by which of ours, in every server process."""

from __future__ import annotations

from miles_dmd_sglang import counters, layouts, report, stop


def register() -> None:
    """Raises RuntimeError for a release that it does not know; sglang then logs it and serves without the plugin."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    layout = layouts.find()
    HookRegistry.register(layout.prepare, stop.before_loop, HookType.BEFORE)
    for target, hook in (
        (layout.step, stop.around_step),
        (layout.noise, stop.around_noise),
        (layout.decode, stop.around_decode),
        (layout.forward, counters.around_forward),
        (layout.from_tensor, counters.around_update),
        (layout.from_disk, counters.around_update),
        (layout.checksum, report.around_checksum),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
