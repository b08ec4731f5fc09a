"""Servers of a run start in turn where they share a device, and beside each other where they do not."""

from types import SimpleNamespace

from miles_dmd.cluster.server_actor import serve_all


class Supervisor:
    """Remembers who was waited for together."""

    def __init__(self):
        self.turns = []

    def gather(self, calls, doing):
        self.turns.append(sorted(calls))
        return list(calls.values())


def server(number, bundle):
    return SimpleNamespace(name=f"server {number}", bundle=bundle, serve=lambda: f"http://{number}")


def test_servers_of_one_bundle_start_in_turn():
    supervisor = Supervisor()

    urls = serve_all([server(number, number % 2) for number in range(5)], supervisor)

    assert urls == [f"http://{number}" for number in range(5)]
    assert supervisor.turns == [["server 0", "server 1"], ["server 2", "server 3"], ["server 4"]]


def test_run_without_servers_waits_for_none():
    supervisor = Supervisor()

    assert serve_all([], supervisor) == []
    assert supervisor.turns == []
