"""Encoding holds one chunk of embeddings in memory, and reading none but the rows asked for."""

import os
import subprocess
import sys

MEMORY = '''
"""A table of 5 chunks of 32 MiB: how far do encoding it, and then reading it, raise this process's memory?"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from miles_dmd.config.cli import parse_args
from miles_dmd.models.sd3 import family as sd3
from miles_dmd.models.sd3.network import truncations
from miles_dmd.modalities.diffusion import conditions, encoding

ROW = 2 << 20


def open_encoder(checkpoint, **how):
    def encode(texts):
        rows = torch.empty(len(texts), ROW // 4)
        return {"encoder_hidden_states": rows.fill_(len(texts))}

    return encode


family = replace(
    sd3, torch_module=__name__, condition_shapes=lambda checkpoint, length: {"encoder_hidden_states": (ROW // 4,)}
)


def resident(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def rise(work):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    found = work()
    print((resident("VmHWM") - before) / (16 * ROW))
    return found


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    device = torch.device("cpu")
    encoding.ensure_table(args, ["a handwritten one"], device)  # whatever is imported on the way
    path = rise(lambda: encoding.ensure_table(args, [f"a handwritten {number}" for number in range(79)], device))
    rise(lambda: conditions.PromptTable(path).lookup([3, 70]))
'''


def test_no_more_than_one_chunk_is_in_memory(flags, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "measured.py").write_text(MEMORY)

    done = subprocess.run(
        [sys.executable, "-m", "own.measured", *flags("--cache-dir", str(tmp_path), "--model-family", "own.measured")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    encoded, read = map(float, done.stdout.split())
    print(f"peak above start, in chunks: encoding {encoded:.3f}, opening and reading two rows {read:.3f}")
    assert 0.5 < encoded <= 1.05
    assert read <= 0.3
