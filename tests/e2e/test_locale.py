"""A whole run in a locale that knows ASCII alone, of a pipeline and prompts that hold more."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNDEFAULTENCODING": "1"}
STRICT = "import warnings\nwarnings.filterwarnings('error', category=EncodingWarning, module=r'miles_dmd')\n"


def test_run_in_the_c_locale_reads_and_writes_utf_8(flags, teacher, tmp_path):
    """Python's own warning ends the run at any call of ours that leaves the encoding to the locale."""
    shutil.copytree(teacher, tmp_path / "teacher")
    index = json.loads((teacher / "model_index.json").read_text(encoding="utf-8"))
    index["_diffusers_version"] = version = f"{index['_diffusers_version']} \u624b"
    (tmp_path / "teacher" / "model_index.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("a handwritten \u0142 \u624b\na seven\n", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(STRICT, encoding="utf-8")
    words = flags("--local", "--save", "run", "--hf-checkpoint", "teacher", "--prompt-data", "prompts.txt",
                  "--sample-prompts", "2", "--num-rollout", "1")  # fmt: skip

    done = subprocess.run(
        [sys.executable, ROOT / "train_diffusion.py", *words], cwd=tmp_path, capture_output=True, encoding="utf-8",
        env=os.environ | C_LOCALE | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    student = json.loads((tmp_path / "run" / "student" / "model_index.json").read_text(encoding="utf-8"))
    assert student["_diffusers_version"] == version
