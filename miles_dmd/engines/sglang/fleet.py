"""Servers of a run: admission, eviction, readmission, sleep and wake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles_dmd.engines.sglang import weights
from miles_dmd.engines.sglang.client import Client, Patience, nobody_listens
from miles_dmd.engines.sglang.families import Served
from miles_dmd.engines.sglang.pool import Member, Pool, outcomes
from miles_dmd.engines.sglang.probe import Capabilities, other_law, probe, report
from miles_dmd.engines.sglang.wire import Sampling
from miles_dmd.errors import EngineError, EngineGone, EngineMisanswer, EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

FIRST = "--sglang-first-sample-timeout"
KNOCK = 5.0
"""Seconds for the first word of a server that was taken out: it may hang for ever, and is asked again next time."""
SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"


PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
RequireEncoders = Callable[[Client, Capabilities, Patience], None]
"""Raises EngineError for a server that encodes prompts otherwise than the run."""


class Fleet:
    def __init__(
        self,
        clients: Sequence[Client],
        sampling: Sampling,
        *,
        family: Served,
        text: str,
        options: Any,
        dtype: str,
        require_encoders: RequireEncoders,
    ) -> None:
        """``text`` is the prompt of probes. Raises EngineError that names the first server that cannot be used."""
        self.sampling, self.family, self.text, self.dtype = sampling, family, text, dtype
        self.require_encoders = require_encoders
        self.patience = Patience(options.sglang_probe_timeout, options.sglang_deadline, "--sglang-probe-timeout")
        self.first = Patience(options.sglang_first_sample_timeout, options.sglang_deadline, FIRST)
        self.knock = Patience(min(KNOCK, self.patience.timeout), 0.0, flag="")
        self.attached = bool(options.sglang_url)
        self.asleep = False
        self.pool = Pool([self._introduced(client) for client in clients])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(map(_note, self.pool.members))

    # -- who is there -----------------------------------------------------------------------------------------------

    def _introduced(self, client: Client) -> Member:
        capabilities = self._usable(client)
        law = other_law(client, self.sampling, capabilities, self.text, self.dtype, patience=self.first)
        checksum = weights.checksum(client) if capabilities.updates is None else ""
        return Member(client, capabilities, law=law, version=0, checksum=checksum)

    def _usable(self, client: Client) -> Capabilities:
        """Of a server that nothing is known of yet. Raises EngineError for one that cannot be used, with the reason."""
        capabilities = self._awake(client, probe(client, self.family.pipeline, patience=self.patience))
        require_precision(client.url, capabilities, self.dtype, self.family)
        self.require_encoders(client, capabilities, self.first)
        return capabilities

    def _awake(self, client: Client, capabilities: Capabilities) -> Capabilities:
        """Whoever used it last may have left it asleep. Without our plugin it does not tell, and is woken anyway."""
        if capabilities.plugin and not capabilities.asleep:
            return capabilities
        client.succeed(WAKE, {}, patience=self.patience)
        return replace(capabilities, asleep=False)

    def returning(self, members: Sequence[Member]) -> list[Member]:
        """Those of ``members``, which were taken out, that are back: awake, with weights of an unknown version."""
        found = outcomes(members, self._is_back)
        for member, error in found:
            member.wrong = str(error) if error else member.wrong
        return [member for member, error in found if error is None]

    def _is_back(self, member: Member) -> None:
        # where nobody else is left, one that is being started again is waited for
        member.client.get("/health", patience=self.knock if self.pool.admitted else self.patience)
        member.capabilities = self._usable(member.client)
        member.slept = member.compared = False
        member.version = None

    def readmit(self, members: Sequence[Member]) -> None:
        """After real samples, drawn as ever; that a server is alive says little."""
        for member, error in outcomes(members, self._samples_as_ever):
            member.wrong = str(error) if error else ""
            log.warning("%s %s", member.client.url, f"stays out: {error}" if error else "is taken in again")

    def _samples_as_ever(self, member: Member) -> None:
        law = other_law(
            member.client, self.sampling, member.capabilities, self.text, self.dtype, patience=self.patience
        )
        if law != member.law:
            raise EngineMisanswer(
                f"{member.client.url} samples otherwise than before it was taken out: "
                f"{law or 'as the in-process engine does'}, then {member.law or 'as the in-process engine does'}"
            )

    def take_out(self, member: Member, why: EngineError) -> None:
        if not member.wrong:  # of several requests that fail, the first tells it
            member.wrong = str(why)
            log.warning("%s is taken out: %s", member.client.url, why)

    def take_out_the_dead(self) -> None:
        """One that does not answer is asked for nothing any more."""
        for member, error in outcomes(self.pool.admitted, self._answers):
            if error:
                self.take_out(member, error)

    def _answers(self, member: Member) -> None:
        member.client.get("/health", patience=self.patience)

    def evict_changed(self, members: Iterable[Member]) -> list[Member]:
        """Those that hold other weights than they were sent last; they are asked."""
        evicted = [(member, error) for member, error in outcomes(list(members), self._require_unchanged) if error]
        for member, error in evicted:
            self.take_out(member, error)
        return [member for member, _ in evicted]

    def _require_unchanged(self, member: Member) -> None:
        if not member.checksum:
            found = report(member.client, member.capabilities.version, patience=self.patience)
            if found.updates != member.capabilities.updates:
                raise changed(member, found.updates)
        elif weights.checksum(member.client) != member.checksum:
            raise EngineUnavailable(
                f"{member.client.url} holds other weights than it was sent: it was restarted, or somebody else "
                "updates it"
            )

    def health(self) -> Mapping[str, str]:
        """server -> empty, or what is wrong with it."""
        found = dict(outcomes(self.pool.admitted, self._answers))
        return {member.client.url: member.wrong or str(found.get(member) or "") for member in self.pool.members}

    # -- memory -----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Returns when every server that answers has given its memory back: a trainer may use the device then."""
        self.take_out_the_dead()
        self._settle(asleep=True)
        for member, error in outcomes(self.pool.out, self._give_back):
            if error and not isinstance(error, EngineGone) and not nobody_listens(error):
                log.warning("%s may keep its memory while trainers compute: %s", member.client.url, error)
        self.asleep = True

    def wake(self) -> None:
        self.take_out_the_dead()
        self._settle(asleep=False)
        self.asleep = False

    def _settle(self, *, asleep: bool) -> None:
        for member, error in outcomes(self.pool.admitted, lambda member: self._settled(member, asleep)):
            if isinstance(error, EngineUnavailable):
                self.take_out(member, error)
            elif error:
                raise error
        if not self.attached:  # nobody starts those again; of others, one may be back for the next weights
            self.pool.require_one()

    def _settled(self, member: Member, asleep: bool) -> None:
        found = self._switch(member, asleep, self.patience)
        if found is not None and found.updates != member.capabilities.updates:
            raise changed(member, found.updates)

    def _give_back(self, member: Member) -> None:
        """One that was taken out and lives on has the device's memory like any other."""
        self._switch(member, True, self.knock)

    def _switch(self, member: Member, asleep: bool, patience: Patience) -> Capabilities | None:
        """What the server is then, where our plugin tells it."""
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
        """Servers that others go on using are left as they were found; those of the run end with it."""
        if self.attached:
            slept = [member for member in self.pool.members if member.slept]
            for member, error in outcomes(slept, lambda member: self._switch(member, False, self.knock)):
                if error:
                    log.warning("%s may be left asleep: %s", member.client.url, error)
        for member in self.pool.members:
            member.client.close()


def require_precision(server: str, capabilities: Capabilities, dtype: str, family: Served) -> None:
    """Raises EngineRefused where the network computes in another precision than the run's; not without our plugin."""
    told = {
        name: kind for name, (_, kind) in (capabilities.parameters or {}).items() if name not in family.fixed_parameters
    }
    found = sorted({kind.removeprefix("torch.") for kind in told.values()})
    if found and found != [PRECISIONS[dtype]]:
        encoders = " ".join([dtype] * len(family.text_encoders))
        raise EngineRefused(
            f"{server} holds its network in {' and '.join(found)}, and --compute-dtype is {dtype}: start it with "
            f"--dit-precision {dtype} --text-encoder-precisions {encoders}"
        )


def changed(member: Member, updates: int | None) -> EngineUnavailable:
    """The failure of a server that has had other weight updates than the run's."""
    return EngineUnavailable(
        f"{member.client.url} has had {updates} weight updates, and {member.capabilities.updates} are known: it was "
        "restarted, or somebody else updates it"
    )


def _note(member: Member) -> str:
    differs = f"; samples differ from the in-process engine's: {member.law}" if member.law else ""
    return f"{member.client.url}: {member.capabilities}{differs}"
