"""One SGLang server over HTTP: what is asked again, what is not, and what an error says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import stamina

from miles_dmd.errors import EngineMisanswer, EngineRefused, EngineUnavailable

SHOWN = 300
"""Characters of a request or a reason in an error."""
FINAL = ("miles_dmd:", "Server is sleeping", "while the server is sleeping")
"""Reasons that come with status 500 and that no repetition changes."""


class Client:
    """Requests may be made from several threads. ``transport`` stands for the network in tests."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        deadline: float,
        connections: int,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url, self.deadline = url.rstrip("/"), deadline
        limits = httpx.Limits(max_connections=connections + 1)  # one more, for what is not a sample
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=limits,
            transport=transport,
            trust_env=False,  # a proxy for the internet is none for these
        )
        self.sent_bytes = self.received_bytes = 0

    def get(self, path: str, *, deadline: float | None = None) -> dict[str, Any]:
        return self._json(path, self._call("GET", path, None, deadline))

    def post(self, path: str, body: Mapping[str, Any], *, deadline: float | None = None) -> dict[str, Any]:
        return self._json(path, self._call("POST", path, body, deadline))

    def generate(self, body: Mapping[str, Any], *, deadline: float | None = None) -> bytes:
        """The answer to a rollout request, as it came."""
        return self._call("POST", "/rollout/generate", body, deadline).content

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float | None) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        limit = self.deadline if deadline is None else deadline
        once = limit <= 0
        # jitter: a server that fails under load gets its requests back one by one
        for attempt in stamina.retry_context(
            on=EngineUnavailable,
            attempts=1 if once else None,
            timeout=None if once else limit,
            wait_initial=0.2,
            wait_max=5.0,
            wait_jitter=1.0,
        ):
            with attempt:
                return self._once(method, path, content)
        raise AssertionError("a retry context ends with a result or an error")

    def _once(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        try:
            answer = self._http.request(
                method, path, content=content, headers={"content-type": "application/json"} if content else None
            )
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{self.url}{path}: no answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        self.sent_bytes += len(content or b"")
        self.received_bytes += len(answer.content)
        if answer.status_code == 200:
            return answer
        raise self._failure(answer, path, content)

    def _failure(self, answer: httpx.Response, path: str, content: bytes | None) -> Exception:
        reason = _short(answer.text)
        message = f"{self.url}{path}: status {answer.status_code}: {reason}"
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


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
