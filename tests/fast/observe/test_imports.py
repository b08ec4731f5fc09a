"""Observing costs nothing at start-up: --help must answer at once."""

import subprocess
import sys


def test_importing_what_observes_loads_nothing_heavy():
    code = (
        "import sys\n"
        "import miles_dmd.files, miles_dmd.prompts, miles_dmd.seeds\n"
        "from miles_dmd.observe import log, metrics, pictures, progress, spans, summary, trackers\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'PIL', 'rich', 'tqdm', 'wandb', 'tensorboard', 'ray'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"
