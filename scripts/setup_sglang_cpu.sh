#!/usr/bin/env bash
# The environment of SGLang's real servers on a CPU, diffusion and language models, with our plugin: about 4 minutes, 3 GB.
# Usage: scripts/setup_sglang_cpu.sh [DIRECTORY]   (default .sglang-venv; also MILES_DMD_SGLANG_VENV)
# The tests that need a server look there, or at the Python that MILES_DMD_SGLANG_PYTHON names.
# On an index where torch is a CUDA build, name one that has CPU builds in PIP_INDEX_URL.
# Versions may be chosen: SGLANG_VERSION=0.5.22 scripts/setup_sglang_cpu.sh DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${1:-${MILES_DMD_SGLANG_VENV:-.sglang-venv}}
version=${SGLANG_VERSION:-0.5.23}
if [ ! -x "$directory/bin/python" ]; then
    python3 -m venv "$directory"
fi
pip() { "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
# sglang's own pins ask for a CUDA build of torch, so it comes without its dependencies, and these are its dependencies here
pip torch==2.13.0 -r scripts/sglang_cpu_requirements.txt
pip --no-deps "sglang==$version" torchvision==0.28.0
# a copy of the plugin, not a link to it: a server never changes under a run
pip --no-deps --force-reinstall ./sglang_plugin
"$directory/bin/python" - <<'CHECK'
from importlib.metadata import entry_points, version

for group in ("sglang.multimodal_gen.plugins", "sglang.srt.plugins"):
    assert [point.name for point in entry_points(group=group)] == ["miles_dmd"], group
print(f"sglang {version('sglang')}, torch {version('torch')}, miles-dmd-sglang {version('miles-dmd-sglang')}")
CHECK
echo "server environment: $directory/bin/python"
