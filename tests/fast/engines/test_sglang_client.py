"""One server over HTTP: what is asked again, what is not, and what the error says. The network is a function."""

import time

import httpx
import pytest

from miles_dmd.engines.sglang.client import Client
from miles_dmd.errors import EngineMisanswer, EngineRefused, EngineUnavailable

URL = "http://server"


def client_of(answers, deadline=5.0):
    """Answers in turn, the last one for ever; an exception is raised. Also returns the list of what was asked."""
    asked = []

    def answer(request):
        asked.append(request)
        found = answers[min(len(asked), len(answers)) - 1]
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found[0], text=found[1])

    return Client(URL, timeout=1.0, deadline=deadline, connections=1, transport=httpx.MockTransport(answer)), asked


@pytest.mark.parametrize(
    "failure",
    [(500, "out of memory"), (503, ""), (429, "slow down"), httpx.ReadTimeout("late"), httpx.ConnectError("refused"),
     httpx.RemoteProtocolError("peer closed connection without sending complete message body")],
)  # fmt: skip
def test_passing_failure_is_asked_again(failure):
    client, asked = client_of([failure, failure, (200, "{}")])

    assert client.get("/health") == {}
    assert len(asked) == 3


def test_repetition_ends_at_the_deadline():
    client, asked = client_of([(500, "still broken")], deadline=1.0)
    started = time.monotonic()

    with pytest.raises(EngineUnavailable, match="http://server/x: status 500: still broken"):
        client.get("/x")

    assert len(asked) > 1
    assert time.monotonic() - started < 3


def test_deadline_of_zero_asks_once():
    client, asked = client_of([(500, "broken")])

    with pytest.raises(EngineUnavailable):
        client.get("/x", deadline=0.0)

    assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "Invalid sampling params: sigmas"), (404, "Not Found"), (422, "seed: must be an integer"),
     (500, "miles_dmd: stop step 9 lies outside [0, 3]"), (500, "Server is sleeping. Call resume")],
)  # fmt: skip
def test_refusal_is_told_with_the_request_and_never_repeated(status, reason):
    client, asked = client_of([(status, reason)])

    with pytest.raises(EngineRefused) as error:
        client.post("/rollout/generate", {"prompt": "a cat"})

    assert len(asked) == 1
    for part in (URL, str(status), reason, "a cat"):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["<html>", "[1]", '{"half": '])
def test_answer_that_is_no_object_is_refused(text):
    client, _ = client_of([(200, text)])

    with pytest.raises(EngineMisanswer, match="http://server/x: the answer is no"):
        client.get("/x")


def test_bytes_are_counted():
    client, _ = client_of([(200, "{}")])

    client.post("/x", {"a": 1})

    assert (client.sent_bytes, client.received_bytes) == (len('{"a": 1}'), 2)
