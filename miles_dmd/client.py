"""HTTP client of one SGLang server: timeouts, retries, error messages."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from miles_dmd.errors import EngineGone, EngineMisanswer, EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

SHOWN = 300
"""Characters of a request or a reason in an error."""
FINAL = ("miles_dmd:", "Server is sleeping", "while the server is sleeping", "device type for generator")
"""Reasons for a status of 500 that no repetition changes. The last: re-noising on a GPU, without our plugin."""
DEAD = "restart the server"
"""Said by a server whose worker has died, for as long as it lives."""
HEALTH_TIMEOUT = 5.0
"""Seconds for an answer of a server that may well hang, and is asked once."""
CONNECT = 10.0
"""Most seconds to wait for a connection."""
BACKOFF = wait_exponential(multiplier=0.2, max=5.0) + wait_random(0.0, 1.0)
"""Jitter: a server that fails under load gets its requests back one by one."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The retry law, the same for every call: an attempt is awaited so long, and a failure repeated over so long."""

    timeout: float
    """Seconds for one answer."""
    deadline: float
    """Seconds over which a failure that may pass is repeated; 0 asks once."""
    flag: str = "--sglang-timeout"
    """Flag that sets ``timeout``, for messages; empty where there is none."""

    def __str__(self) -> str:
        return f"{self.flag} {self.timeout:g} s".lstrip()


class Client:
    """Requests may be made from several threads. ``transport`` stands for the network in tests.

    ``timeout`` and ``deadline`` are the ``Patience`` of calls that name none of their own. ``managed``: the run has
    started the server, so nobody else starts it again.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        deadline: float,
        connections: int,
        managed: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url, self.patience, self.managed = url.rstrip("/"), Patience(timeout, deadline), managed
        limits = httpx.Limits(max_connections=connections + 1)  # one more, for what is not a sample
        self._http = httpx.Client(
            base_url=self.url,
            limits=limits,
            transport=transport,
            trust_env=False,  # a proxy for the internet is none for these
        )
        self.sent_bytes = self.received_bytes = 0
        self.attempts: Counter[str] = Counter()
        """path -> requests made, repetitions included."""

    def get(self, path: str, *, patience: Patience | None = None) -> dict[str, Any]:
        return self._json(path, self._call("GET", path, None, patience))

    def require_health(self, *, patience: Patience | None = None) -> None:
        """Raises EngineError unless it says that it can serve; what else it says is each kind of server's own."""
        self._call("GET", "/health", None, patience)

    def post(self, path: str, body: Mapping[str, Any], *, patience: Patience | None = None) -> dict[str, Any]:
        return self._json(path, self._call("POST", path, body, patience))

    def succeed(self, path: str, body: Mapping[str, Any], *, patience: Patience | None = None) -> None:
        """POST; the answer must say success."""
        answer = self.post(path, body, patience=patience)
        if answer.get("success") is not True:
            raise EngineRefused(f"{self.url}{path}: {answer.get('message', 'no success, and no reason')}")

    def content(self, path: str, body: Mapping[str, Any], *, patience: Patience | None = None) -> bytes:
        """POST; the answer as it came."""
        return self._call("POST", path, body, patience).content

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, patience: Patience | None
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        patience = patience or self.patience
        retrying = Retrying(
            retry=retry_if_exception(_passes),
            stop=stop_after_delay(patience.deadline),
            wait=BACKOFF,
            before_sleep=_log_retry,
            reraise=True,
        )
        return retrying(self._once, method, path, content, patience)

    def _once(self, method: str, path: str, content: bytes | None, patience: Patience) -> httpx.Response:
        self.attempts[path] += 1
        try:
            answer = self._http.request(
                method,
                path,
                content=content,
                headers={"content-type": "application/json"} if content else None,
                timeout=httpx.Timeout(patience.timeout, connect=min(patience.timeout, CONNECT)),
            )
        except httpx.ConnectTimeout as error:
            raise EngineUnavailable(f"{self.url}{path}: no connection within {CONNECT:g} s") from error
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{self.url}{path}: no answer within {patience}") from error
        except httpx.TransportError as error:
            kind = EngineGone if self.managed and nobody_listens(error) else EngineUnavailable
            raise kind(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        self.sent_bytes += len(content or b"")
        self.received_bytes += len(answer.content)
        if answer.status_code == 200:
            return answer
        raise self._failure(answer, path, content)

    def _failure(self, answer: httpx.Response, path: str, content: bytes | None) -> Exception:
        reason = _short(answer.text)
        message = f"{self.url}{path}: status {answer.status_code}: {reason}"
        if DEAD in reason:
            return EngineGone(message)
        try_again = answer.status_code >= 500 or answer.status_code in (408, 429)
        if try_again and not any(final in reason for final in FINAL):
            return EngineUnavailable(message)
        asked = f"; asked: {_short(content.decode())}" if content else ""
        return EngineRefused(message + asked)

    def _json(self, path: str, answer: httpx.Response) -> dict[str, Any]:
        try:
            content = answer.json()
        except ValueError as error:
            raise EngineMisanswer(f"{self.url}{path}: the answer is no JSON: {_short(answer.text)}") from error
        if not isinstance(content, dict):
            raise EngineMisanswer(f"{self.url}{path}: the answer is no object: {_short(answer.text)}")
        return content


def _passes(error: BaseException) -> bool:
    return isinstance(error, EngineUnavailable) and not isinstance(error, EngineGone)


def _log_retry(state: RetryCallState) -> None:
    """An EngineUnavailable begins with server and reason."""
    if state.outcome is not None:
        log.warning("%s; asked again in %.1f s", state.outcome.exception(), state.upcoming_sleep)


def nobody_listens(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _short(text: str) -> str:
    if text.lstrip().startswith("<"):
        return "a web page, which SGLang does not send"
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
