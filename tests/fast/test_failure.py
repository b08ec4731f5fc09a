"""A failed run in one line."""

from pathlib import Path

import pytest

from miles_dmd import failure
from miles_dmd.errors import ClusterError


@pytest.fixture
def error():
    try:
        try:
            raise ZeroDivisionError("division by zero")
        except ZeroDivisionError as cause:
            raise ClusterError("critic rank 1 failed while\ntraining: division by zero") from cause
    except ClusterError as raised:
        return raised


def whole(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "manifest.json").touch()
    return directory


def test_line_names_the_cause_and_the_traceback_which_holds_all_causes(error, tmp_path):
    line = failure.describe_failure(error, tmp_path, None)

    assert line == (
        f"ClusterError: critic rank 1 failed while training: division by zero; traceback in {tmp_path / 'failure.log'}"
    )
    assert "ZeroDivisionError: division by zero" in (tmp_path / "failure.log").read_text()


def test_line_names_the_last_whole_checkpoint(error, tmp_path):
    for cycle in (2, 10):
        whole(tmp_path / "checkpoints" / f"cycle_{cycle:06d}")
    (tmp_path / "checkpoints" / "cycle_000012").mkdir()

    assert f"; go on with --load {tmp_path}/checkpoints/cycle_000010 --save {tmp_path}; " in failure.describe_failure(
        error, tmp_path, failure.last_checkpoint(tmp_path)
    )


def test_run_without_a_directory_leaves_its_traceback_elsewhere(error):
    path = Path(failure.describe_failure(error, None, None).rpartition(" ")[2])

    assert "ZeroDivisionError" in path.read_text()
    path.unlink()
    path.parent.rmdir()


def test_directory_that_cannot_be_written_hides_no_failure(error, tmp_path):
    (tmp_path / "file").touch()

    assert "critic rank 1 failed" in failure.describe_failure(error, tmp_path / "file" / "below", None)


def test_stopped_run_says_by_whom_and_what_is_left(tmp_path):
    without = failure.describe_stop(15, tmp_path, None)
    checkpoint = whole(tmp_path / "checkpoints" / "cycle_000003")

    assert without == "stopped by SIGTERM; it has no checkpoint"
    assert failure.describe_stop(2, tmp_path, checkpoint) == (
        f"stopped by SIGINT; go on with --load {checkpoint} --save {tmp_path}"
    )
    elsewhere = failure.describe_stop(2, tmp_path / "another", checkpoint)
    assert elsewhere == f"stopped by SIGINT; go on with --load {checkpoint}"
