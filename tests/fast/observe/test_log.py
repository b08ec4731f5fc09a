"""Log lines are one line each, and third parties speak only when something is wrong."""

import io
import logging
import sys
import warnings

import pytest

from miles_dmd.observe.log import setup_logging


@pytest.fixture(autouse=True)
def _logging_as_before():
    root = logging.getLogger()
    handlers, levels = root.handlers[:], (root.level, logging.getLogger("miles_dmd").level)
    yield
    root.handlers[:] = handlers
    for name, level in zip(("root", "miles_dmd"), levels, strict=True):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


def test_a_record_is_one_line_with_time_level_and_name(capsys):
    setup_logging("info")

    logging.getLogger("miles_dmd.run").info("trains\n  two groups")

    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.endswith("INFO    miles_dmd.run: trains | two groups\n")


def test_third_parties_are_quiet_until_something_is_wrong(capsys):
    setup_logging("info")

    for name in ("filelock.api", "/site-packages/huggingface_hub/serialization/_torch.py"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("broken")

    written = capsys.readouterr().err
    assert "chatter" not in written
    assert written.count("broken") == 2


@pytest.mark.parametrize(("level", "seen"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_the_level_decides_what_is_seen(capsys, level, seen):
    setup_logging(level)

    logging.getLogger("miles_dmd").debug("one")
    logging.getLogger("miles_dmd").info("two")

    assert len(capsys.readouterr().err.splitlines()) == seen


def test_setting_up_twice_writes_once_and_follows_standard_error(monkeypatch, capsys):
    setup_logging()
    setup_logging()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)

    logging.getLogger("miles_dmd").info("once")

    assert capsys.readouterr().err == ""
    assert later.getvalue().count("once") == 1


def test_a_traceback_keeps_its_lines(capsys):
    setup_logging()

    try:
        raise RuntimeError("inner")
    except RuntimeError:
        logging.getLogger("miles_dmd").exception("failed")

    assert "failed\nTraceback" in capsys.readouterr().err


def test_warnings_go_the_same_way(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # whatever an earlier test left
        setup_logging()
        warnings.warn("deprecated", stacklevel=1)

    assert "WARNING py.warnings" in capsys.readouterr().err


def test_an_unknown_level_is_refused_with_the_list():
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        setup_logging("loud")
