"""One server over HTTP: what is asked again, what is not, and what the error says. The network is a function."""

import httpx
import pytest

from miles_dmd.client import Client, Patience
from miles_dmd.errors import EngineGone, EngineMisanswer, EngineRefused, EngineUnavailable

URL = "http://server"


def client_of(answers, deadline=5.0, **more):
    """Answers in turn, the last one for ever; an exception is raised. Also returns the list of what was asked."""
    asked = []

    def answer(request):
        asked.append(request)
        found = answers[min(len(asked), len(answers)) - 1]
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found[0], text=found[1])

    transport = httpx.MockTransport(answer)
    return Client(URL, timeout=1.0, deadline=deadline, connections=1, transport=transport, **more), asked


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

    with pytest.raises(EngineUnavailable, match="http://server/x: status 500: still broken"):
        client.get("/x")  # a repetition without end would meet the limit of the test

    assert len(asked) > 1


def test_a_patience_of_its_own_has_the_same_law():
    client, asked = client_of([(500, "broken"), (200, "{}")], deadline=0.0)

    assert client.get("/x", patience=Patience(timeout=0.5, deadline=5.0)) == {}

    assert [request.extensions["timeout"]["read"] for request in asked] == [0.5, 0.5]


def test_request_without_a_deadline_is_made_once():
    client, asked = client_of([(500, "broken")])

    with pytest.raises(EngineUnavailable):
        client.get("/x", patience=Patience(timeout=0.5, deadline=0.0))

    assert len(asked) == 1


def test_repetition_is_told_with_server_and_reason(caplog):
    client, _ = client_of([(503, "warming up"), (200, "{}")])

    client.get("/health")

    (record,) = caplog.records
    assert record.getMessage().startswith("http://server/health: status 503: warming up; asked again in ")


@pytest.mark.parametrize(("status", "refusal"), [(200, EngineMisanswer), (404, EngineRefused)])
def test_a_web_page_is_named_and_not_shown(status, refusal):
    page = "\n<!DOCTYPE html><html><body><h1>It works</h1></body></html>"
    client, _ = client_of([(status, page)])

    with pytest.raises(refusal, match="a web page") as error:
        client.post("/x", {})

    assert "html" not in str(error.value).lower()


def refused():
    error = httpx.ConnectError("refused")
    error.__cause__ = ConnectionRefusedError()
    return error


@pytest.mark.parametrize(
    ("managed", "failure"),
    [(True, refused()), (False, (503, "Scheduler worker exited; restart the server.")),
     (True, (500, "Scheduler worker exited; restart the server."))],
)  # fmt: skip
def test_server_that_is_dead_is_not_asked_again(managed, failure):
    client, asked = client_of([failure], managed=managed)

    with pytest.raises(EngineGone):
        client.post("/x", {})

    assert len(asked) == 1


def test_server_of_others_may_be_started_again():
    client, asked = client_of([refused(), (200, "{}")])

    assert client.get("/x") == {}
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "Invalid sampling params: sigmas"), (404, "Not Found"), (422, "seed: must be an integer"),
     (500, "Expected a 'cuda' device type for generator but found 'cpu'"),
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
