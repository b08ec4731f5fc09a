"""Servers of a run: admission, eviction, readmission, sleep and wake."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles_dmd.engines.sglang import weights
from miles_dmd.engines.sglang.client import Client, nobody_listens
from miles_dmd.engines.sglang.families import Served
from miles_dmd.engines.sglang.pool import Member, Pool, outcomes
from miles_dmd.engines.sglang.probe import Capabilities, other_law, probe, report
from miles_dmd.engines.sglang.wire import Sampling
from miles_dmd.errors import EngineError, EngineGone, EngineMisanswer, EngineUnavailable

log = logging.getLogger(__name__)

KNOCK = 5.0
"""Seconds for the first word of a server that was taken out: it may hang for ever, and is asked again next time."""
SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"


class Fleet:
    def __init__(
        self, clients: Sequence[Client], sampling: Sampling, *, family: Served, text: str, options: Any, dtype: str
    ) -> None:
        """``text`` is the prompt of probes. Raises EngineError that names the first server that cannot be used."""
        self.sampling, self.family, self.text, self.dtype = sampling, family, text, dtype
        self.patience: float = options.sglang_probe_timeout
        self.knock = min(KNOCK, self.patience)
        self.attached = bool(options.sglang_url)
        self.asleep = False
        self.pool = Pool([self._introduced(client) for client in clients])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(map(_note, self.pool.members))

    # -- who is there -----------------------------------------------------------------------------------------------

    def _introduced(self, client: Client) -> Member:
        capabilities = self._awake(client, probe(client, self.family.pipeline))
        law = other_law(client, self.sampling, capabilities, self.text, self.dtype)
        checksum = weights.checksum(client) if capabilities.updates is None else ""
        return Member(client, capabilities, law=law, version=0, checksum=checksum)

    def _awake(self, client: Client, capabilities: Capabilities, *, patience: float | None = None) -> Capabilities:
        """Whoever used it last may have left it asleep. Without our plugin it does not tell, and is woken anyway."""
        if capabilities.plugin and not capabilities.asleep:
            return capabilities
        client.succeed(WAKE, {}, patience=patience)
        return replace(capabilities, asleep=False)

    def returning(self) -> list[Member]:
        """Those that were taken out and are back: awake, and with weights of nobody knows which version."""
        found = outcomes(self.pool.out, self._is_back)
        for member, error in found:
            member.wrong = str(error) if error else member.wrong
        return [member for member, error in found if error is None]

    def _is_back(self, member: Member) -> None:
        member.client.get("/health", patience=self.knock)
        found = probe(member.client, self.family.pipeline, patience=self.patience)
        member.capabilities = self._awake(member.client, found, patience=self.patience)
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
        """One that does not answer is asked for nothing any more. Raises EngineError where none is left."""
        for member, error in outcomes(self.pool.admitted, self._answers):
            if error:
                self.take_out(member, error)
        self.pool.require_one()

    def _answers(self, member: Member) -> None:
        member.client.get("/health", patience=self.patience)

    def take_out_the_changed(self) -> bool:
        """Whether one that counts no updates was found with other weights than it was sent last."""
        found = outcomes([member for member in self.pool.admitted if member.checksum], self._is_unchanged)
        for member, error in found:
            if error:
                self.take_out(member, error)
        return any(error for _, error in found)

    def _is_unchanged(self, member: Member) -> None:
        if weights.checksum(member.client) != member.checksum:
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
        for member, error in outcomes(self.pool.admitted, lambda member: self._switch(member, asleep, self.patience)):
            if isinstance(error, EngineUnavailable):
                self.take_out(member, error)
            elif error:
                raise error
        self.pool.require_one()

    def _give_back(self, member: Member) -> None:
        """One that was taken out and lives on has the device's memory like any other."""
        self._switch(member, True, self.knock)

    def _switch(self, member: Member, asleep: bool, patience: float) -> None:
        path = SLEEP if asleep else WAKE
        member.slept = asleep or member.slept  # also where the answer does not come
        member.client.succeed(path, {}, patience=patience)
        member.slept = asleep
        if member.capabilities.plugin:
            found = report(member.client, member.capabilities.version, patience=patience)
            if found.asleep != asleep:
                state = "asleep" if found.asleep else "awake"
                raise EngineError(f"{member.client.url}{path} says success, and the server is {state}")

    def close(self) -> None:
        """Servers that others go on using are left as they were found; those of the run end with it."""
        if self.attached:
            slept = [member for member in self.pool.members if member.slept]
            for member, error in outcomes(slept, lambda member: self._switch(member, False, self.knock)):
                if error:
                    log.warning("%s may be left asleep: %s", member.client.url, error)
        for member in self.pool.members:
            member.client.close()


def _note(member: Member) -> str:
    differs = f"; samples differ from the in-process engine's: {member.law}" if member.law else ""
    return f"{member.client.url}: {member.capabilities}{differs}"
