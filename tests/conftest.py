"""Shared fixtures: one thread, the shipped digits teacher, small networks, and arguments to run them with."""

import os
import shutil
import signal
from pathlib import Path

# whoever starts pytest in the background, or by nohup, ignores these, and every process of a test would inherit it
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is imported: two threads on a busy 2-core machine are far slower
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# a deadline on an example measures the machine's load, not the code
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"


def pytest_terminal_summary(terminalreporter, config):
    deselected = [item for item in terminalreporter.stats.get("deselected", []) if item.get_closest_marker("long")]
    if deselected:
        terminalreporter.write_line(f"{len(deselected)} long tests deselected; run them with `pytest -m long`:")
        for item in deselected:
            terminalreporter.write_line(f"  {item.nodeid}")


def pytest_collection_modifyitems(config, items):
    """Plain `pytest` leaves the long tests out, and its summary names them."""
    if config.option.markexpr or any("::" in word for word in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def teacher() -> Path:
    return DIGITS / "teacher"


@pytest.fixture
def copy(teacher, tmp_path) -> Path:
    """The digits teacher, to be changed."""
    return shutil.copytree(teacher, tmp_path / "copy")


@pytest.fixture(scope="session")
def digit_prompts() -> Path:
    return DIGITS / "prompts.txt"


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """Encoded prompts, shared by all tests of a session."""
    return tmp_path_factory.mktemp("cache")


def _latest(words):
    """A command line on which the last of equal flags stands for all of them: the door takes each but once."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    last = {group[0].partition("=")[0].replace("--no-", "--"): group for group in groups}
    return [word for group in last.values() for word in group]


@pytest.fixture(scope="session")
def latest():
    return _latest


@pytest.fixture(scope="session")
def flags(teacher, digit_prompts, cache_dir):
    """Flags of the smallest real run: ``flags("--fake-update-ratio", "1")``."""

    def build(*more: str) -> list[str]:
        smallest = {
            "--loss-type": "dmd2",
            "--hf-checkpoint": str(teacher),
            "--prompt-data": str(digit_prompts),
            "--cache-dir": str(cache_dir),
            "--rollout-batch-size": "4",
            "--micro-batch-size": "4",
            "--fake-update-ratio": "2",
            "--fake-warmup-cycles": "1",
            "--num-rollout": "2",
            "--lr": "1e-4",
            "--sample-prompts": "0",
            "--device": "cpu",
        }
        return _latest([*(word for pair in smallest.items() for word in pair), *more])

    return build


@pytest.fixture(scope="session")
def resolved(flags):
    """The same, parsed and checked: a ResolvedRun."""
    from miles_dmd.config.cli import parse_args
    from miles_dmd.preflight.rules import resolve

    return lambda *more: resolve(parse_args(flags(*more)))


@pytest.fixture(scope="session")
def make_args(resolved):
    """The arguments of that run."""
    return lambda *more: resolved(*more).args


class CountingHook:
    """A hook of the user's own that remembers something."""

    def __init__(self):
        self.count = 0

    def after_completed_step(self, counters, metrics, executor):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.fixture(scope="session")
def counting_hook():
    return CountingHook
