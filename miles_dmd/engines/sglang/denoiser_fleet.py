"""Fleet of SGLang's diffusion servers: admission by probe and two samples, updates counted, sleep confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang.families import Served, served
from miles_dmd.engines.sglang.fleet import CHANGED, SLEEP, WAKE, Fleet, Member
from miles_dmd.engines.sglang.probe import Capabilities, checksum, probe, report, sampling_mismatch
from miles_dmd.engines.sglang.wire import Sampling
from miles_dmd.errors import EngineError, EngineMisanswer, EngineRefused, EngineUnavailable

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
RequireEncoders = Callable[[Client, Capabilities, Patience], None]
"""Raises EngineError for a server that encodes prompts otherwise than the run."""


@dataclass(eq=False)
class Denoiser(Member):
    capabilities: Capabilities = field(kw_only=True)
    mismatch: str = ""
    """Difference of its samples from the in-process engine's; empty where there is none."""
    checksum: str = ""
    """Checksum of its network after the last update, where it does not count updates."""

    def __str__(self) -> str:
        differs = f"; samples differ from the in-process engine's: {self.mismatch}" if self.mismatch else ""
        return f"{self.client.url}: {self.capabilities}{differs}"


class DenoiserFleet(Fleet[Denoiser]):
    def __init__(
        self, args: Args, clients: Sequence[Client], sampling: Sampling, text: str, require_encoders: RequireEncoders
    ) -> None:
        """``text`` is the prompt of probes. Raises EngineError that names the first server that cannot be used."""
        self.family, self.dtype = served(args.model_family), args.compute_dtype
        self.sampling, self.text, self.require_encoders = sampling, text, require_encoders
        super().__init__(clients, args.engine_options)

    def _introduced(self, client: Client) -> Denoiser:
        capabilities = self._usable(client)
        mismatch = self._mismatch(client, capabilities, self.first_sample)
        held = checksum(client) if capabilities.updates is None else ""
        return Denoiser(client, version=0, capabilities=capabilities, mismatch=mismatch, checksum=held)

    def _mismatch(self, client: Client, capabilities: Capabilities, patience: Patience) -> str:
        return sampling_mismatch(client, self.sampling, capabilities, self.text, self.dtype, patience=patience)

    def _usable(self, client: Client) -> Capabilities:
        """Capabilities of an unknown server, awake. Raises EngineError for one that cannot be used, with the reason."""
        capabilities = probe(client, self.family.pipeline, patience=self.patience)
        if capabilities.asleep or not capabilities.plugin:  # without our plugin it does not tell
            client.succeed(WAKE, {}, patience=self.patience)
            capabilities = replace(capabilities, asleep=False)
        require_precision(client.url, capabilities, self.dtype, self.family)
        self.require_encoders(client, capabilities, self.first_sample)
        return capabilities

    def _renew(self, member: Denoiser) -> None:
        member.capabilities = self._usable(member.client)

    def _require_same_samples(self, member: Denoiser) -> None:
        found = self._mismatch(member.client, member.capabilities, self.patience)
        if found != member.mismatch:
            raise EngineMisanswer(
                f"{member.client.url} samples otherwise than before its eviction: "
                f"{found or 'as the in-process engine does'}, then {member.mismatch or 'as the in-process engine does'}"
            )

    def _require_unchanged(self, member: Denoiser) -> None:
        if not member.checksum:
            found = report(member.client, member.capabilities.version, patience=self.patience)
            require_updates(member, found.updates)
        elif checksum(member.client) != member.checksum:
            raise EngineUnavailable(f"{member.client.url} holds other weights than it was sent: {CHANGED}")

    def _settled(self, member: Denoiser, asleep: bool) -> None:
        found = self._switch(member, asleep, self.patience)
        if found is not None:
            require_updates(member, found.updates)

    def _switch(self, member: Denoiser, asleep: bool, patience: Patience) -> Capabilities | None:
        """Put to sleep or wake; the server's report afterwards, where it has our plugin."""
        path = SLEEP if asleep else WAKE
        member.slept = asleep or member.slept  # also where the answer does not come
        member.client.succeed(path, {}, patience=patience)
        member.slept = asleep
        if not member.capabilities.plugin:
            return None
        found = report(member.client, member.capabilities.version, patience=patience)
        if found.asleep != asleep:
            state = "asleep" if found.asleep else "awake"
            raise EngineError(f"{member.client.url}{path} says success, and the server is {state}")
        return found


def require_precision(server: str, capabilities: Capabilities, dtype: str, family: Served) -> None:
    """Raises EngineRefused where the network computes in another precision than the run's; not without our plugin."""
    told = {
        name: kind for name, (_, kind) in (capabilities.parameters or {}).items() if name not in family.fixed_parameters
    }
    found = sorted({kind.removeprefix("torch.") for kind in told.values()})
    if found and found != [PRECISIONS[dtype]]:
        raise EngineRefused(
            f"{server} holds its network in {' and '.join(found)}, and --compute-dtype is {dtype}: start it with "
            f"--dit-precision {dtype} --text-encoder-precisions {' '.join(family.encoder_precisions(dtype))}"
        )


def require_updates(member: Denoiser, updates: int | None) -> None:
    """Raises EngineUnavailable for a server that has had other weight updates than the run's."""
    if updates != member.capabilities.updates:
        raise EngineUnavailable(
            f"{member.client.url} has had {updates} weight updates, and {member.capabilities.updates} are known: "
            f"{CHANGED}"
        )
