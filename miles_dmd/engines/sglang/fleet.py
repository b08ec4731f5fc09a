"""Fleet of SGLang servers: admission, load balancing, eviction, readmission, sleep and wake."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from miles_dmd.client import HEALTH_TIMEOUT, Client, Patience, nobody_listens
from miles_dmd.engines.sglang.families import Served, served
from miles_dmd.engines.sglang.probe import Capabilities, checksum, probe, report, sampling_mismatch
from miles_dmd.engines.sglang.wire import Sampling
from miles_dmd.errors import EngineError, EngineGone, EngineMisanswer, EngineRefused, EngineUnavailable

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.engines.sglang import Options

log = logging.getLogger(__name__)

SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
RequireEncoders = Callable[[Client, Capabilities, Patience], None]
"""Raises EngineError for a server that encodes prompts otherwise than the run."""


@dataclass(eq=False)
class Member:
    client: Client
    capabilities: Capabilities
    version: int | None = None
    """Version of the weights that it holds."""
    mismatch: str = ""
    """Difference of its samples from the in-process engine's; empty where there is none."""
    checksum: str = ""
    """Checksum of its network after the last update, where it does not count updates."""
    evicted: str = ""
    """Reason of its eviction; empty while it is admitted."""
    compared: bool = False
    """True once weights that it was sent have been compared with what it holds."""
    slept: bool = False
    """True where the run has put it to sleep, and not woken it since."""
    outstanding: int = field(default=0, repr=False)

    def __str__(self) -> str:
        differs = f"; samples differ from the in-process engine's: {self.mismatch}" if self.mismatch else ""
        return f"{self.client.url}: {self.capabilities}{differs}"


def outcomes(members: Sequence[Member], call: Callable[[Member], object]) -> list[tuple[Member, EngineError | None]]:
    """``call`` for all members at once, so that one that hangs delays no other: each with its failure, or None."""

    def tried(member: Member) -> EngineError | None:
        try:
            call(member)
        except EngineError as error:
            return error
        return None

    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as threads:
        return list(zip(members, threads.map(tried, members), strict=True))


class Fleet:
    def __init__(
        self, args: Args, clients: Sequence[Client], sampling: Sampling, text: str, require_encoders: RequireEncoders
    ) -> None:
        """``text`` is the prompt of probes. Raises EngineError that names the first server that cannot be used."""
        self.family, self.dtype = served(args.model_family), args.compute_dtype
        self.sampling, self.text, self.require_encoders = sampling, text, require_encoders
        options: Options = args.engine_options
        deadline = options.sglang_deadline
        self.patience = Patience(options.sglang_probe_timeout, deadline, "--sglang-probe-timeout")
        self.first_sample = Patience(options.sglang_first_sample_timeout, deadline, "--sglang-first-sample-timeout")
        self.impatience = Patience(min(HEALTH_TIMEOUT, self.patience.timeout), 0.0, "")
        self.attached = bool(options.sglang_url)
        self.asleep = False
        self._lock = threading.Lock()
        self.members = tuple(map(self._introduced, clients))

    # -- load balancing ---------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if not member.evicted)

    @property
    def evicted(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.evicted)

    def require_one(self) -> None:
        """Raises EngineError where no server is admitted, with the reason of each eviction."""
        if not self.admitted:
            raise EngineError(f"no SGLang server is left: {'; '.join(member.evicted for member in self.members)}")

    @contextlib.contextmanager
    def taken(self) -> Iterator[Member]:
        """The admitted server with the fewest requests under way, for one more. Thread-safe. See ``require_one``."""
        with self._lock:
            self.require_one()
            member = min(self.admitted, key=lambda member: member.outstanding)
            member.outstanding += 1
        try:
            yield member
        finally:
            with self._lock:
                member.outstanding -= 1

    # -- admission --------------------------------------------------------------------------------------------------

    def _introduced(self, client: Client) -> Member:
        capabilities = self._usable(client)
        mismatch = self._mismatch(client, capabilities, self.first_sample)
        held = checksum(client) if capabilities.updates is None else ""
        return Member(client, capabilities, version=0, mismatch=mismatch, checksum=held)

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

    def returning(self, members: Sequence[Member]) -> list[Member]:
        """Evicted ``members`` that are back: awake, with weights of an unknown version."""
        found = outcomes(members, self._is_back)
        for member, error in found:
            member.evicted = str(error) if error else member.evicted
        return [member for member, error in found if error is None]

    def _is_back(self, member: Member) -> None:
        # where nobody else is left, one that is being started again is waited for
        member.client.get("/health", patience=self.impatience if self.admitted else self.patience)
        member.capabilities = self._usable(member.client)
        member.slept = member.compared = False
        member.version = None

    def readmit(self, members: Sequence[Member]) -> None:
        """Admit again whoever draws real samples as before: that a server is alive says little."""
        for member, error in outcomes(members, self._require_same_samples):
            member.evicted = str(error) if error else ""
            log.warning("%s %s", member.client.url, f"stays evicted: {error}" if error else "is readmitted")

    def _require_same_samples(self, member: Member) -> None:
        found = self._mismatch(member.client, member.capabilities, self.patience)
        if found != member.mismatch:
            raise EngineMisanswer(
                f"{member.client.url} samples otherwise than before its eviction: "
                f"{found or 'as the in-process engine does'}, then {member.mismatch or 'as the in-process engine does'}"
            )

    # -- eviction ---------------------------------------------------------------------------------------------------

    def evict(self, member: Member, reason: EngineError) -> None:
        if not member.evicted:  # of several requests that fail, the first gives the reason
            member.evicted = str(reason)
            log.warning("%s is evicted: %s", member.client.url, reason)

    def evict_unreachable(self) -> None:
        for member, error in outcomes(self.admitted, self._require_health):
            if error:
                self.evict(member, error)

    def _require_health(self, member: Member) -> None:
        member.client.get("/health", patience=self.patience)

    def evict_changed(self, members: Iterable[Member]) -> list[Member]:
        """Evict and return the ``members`` whose checksum is not that of the weights that they were sent last."""
        changed = [(member, error) for member, error in outcomes(list(members), self._require_unchanged) if error]
        for member, error in changed:
            self.evict(member, error)
        return [member for member, _ in changed]

    def _require_unchanged(self, member: Member) -> None:
        if not member.checksum:
            found = report(member.client, member.capabilities.version, patience=self.patience)
            require_updates(member, found.updates)
        elif checksum(member.client) != member.checksum:
            raise EngineUnavailable(f"{member.client.url} holds other weights than it was sent: {CHANGED}")

    def health(self) -> Mapping[str, str]:
        """server -> empty, or what is wrong with it."""
        found = dict(outcomes(self.admitted, self._require_health))
        return {member.client.url: member.evicted or str(found.get(member) or "") for member in self.members}

    # -- memory -----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Return when every server that answers has given its memory back: a trainer may use the device then."""
        self.evict_unreachable()
        self._settle(asleep=True)
        for member, error in outcomes(self.evicted, lambda member: self._switch(member, True, self.impatience)):
            if error and not isinstance(error, EngineGone) and not nobody_listens(error):
                log.warning("%s may keep its memory while trainers compute: %s", member.client.url, error)
        self.asleep = True

    def wake(self) -> None:
        self.evict_unreachable()
        self._settle(asleep=False)
        self.asleep = False

    def _settle(self, *, asleep: bool) -> None:
        for member, error in outcomes(self.admitted, lambda member: self._settled(member, asleep)):
            if isinstance(error, EngineUnavailable):
                self.evict(member, error)
            elif error:
                raise error
        if not self.attached:  # nobody starts those again; of others, one may be back for the next weights
            self.require_one()

    def _settled(self, member: Member, asleep: bool) -> None:
        found = self._switch(member, asleep, self.patience)
        if found is not None:
            require_updates(member, found.updates)

    def _switch(self, member: Member, asleep: bool, patience: Patience) -> Capabilities | None:
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

    def close(self) -> None:
        """Wake servers that others go on using; those of the run end with it."""
        if self.attached:
            slept = [member for member in self.members if member.slept]
            for member, error in outcomes(slept, lambda member: self._switch(member, False, self.impatience)):
                if error:
                    log.warning("%s may be left asleep: %s", member.client.url, error)
        for member in self.members:
            member.client.close()


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


CHANGED = "it was restarted, or somebody else updates it"


def require_updates(member: Member, updates: int | None) -> None:
    """Raises EngineUnavailable for a server that has had other weight updates than the run's."""
    if updates != member.capabilities.updates:
        raise EngineUnavailable(
            f"{member.client.url} has had {updates} weight updates, and {member.capabilities.updates} are known: "
            f"{CHANGED}"
        )
