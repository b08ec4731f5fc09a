"""Text is UTF-8, whatever the locale says: no call leaves the encoding to it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "train_diffusion.py",
    *(path for folder in ("miles_dmd", "examples", "scripts", "benchmarks", "sglang_plugin")
      for path in sorted((ROOT / folder).rglob("*.py"))),
]  # fmt: skip
OTHERS = {"os", "Image", "tarfile", "zipfile", "webbrowser"}
"""Modules whose ``open`` opens no text."""
PROCESSES = {"run", "Popen", "check_output", "check_call", "call"}


def leaves_it_to_the_locale(call):
    """True if a call reads or writes text without an encoding."""
    function, given = call.func, {keyword.arg: keyword.value for keyword in call.keywords}
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if "encoding" in given or None in given:
        return False
    if name in PROCESSES:
        return any(getattr(given.get(way), "value", False) for way in ("text", "universal_newlines"))
    if not isinstance(function, ast.Attribute):
        return name == "open" and is_text(call, given, 1)
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) < 2
    owner = getattr(function.value, "id", "")
    if name == "open":
        return owner not in OTHERS and is_text(call, given, 0)
    return ((owner, name) == ("os", "fdopen") and is_text(call, given, 1)) or name in ("FileHandler", "TextIOWrapper")


def is_text(call, given, position):
    mode = given.get("mode") or (call.args[position] if len(call.args) > position else None)
    return mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_call_leaves_the_encoding_to_the_locale(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))

    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and leaves_it_to_the_locale(node)]

    assert found == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("path.read_text()", True),
        ("path.read_text(errors='replace')", True),
        ("path.read_text('utf-8')", False),
        ("read_text(path)", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("path.open(mode='ab')", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("os.fdopen(number, 'w')", True),
        ("subprocess.run(words, text=True)", True),
        ("subprocess.run(words, text=True, encoding='utf-8')", False),
        ("subprocess.run(words)", False),
    ],
)
def test_the_rule_sees_it(text, left):
    assert leaves_it_to_the_locale(ast.parse(text).body[0].value) == left


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def in_c_locale(code, *words, cwd):
    env = os.environ | C_LOCALE | {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONPATH": str(ROOT)}
    strict = "import warnings; warnings.filterwarnings('error', category=EncodingWarning, module='miles_dmd'); "
    return subprocess.run(
        [sys.executable, "-c", strict + code, *words], cwd=cwd, env=env, capture_output=True, encoding="utf-8"
    )


def test_traceback_holds_what_the_locale_cannot_write(tmp_path):
    code = (
        "from pathlib import Path; from miles_dmd.failure import report_failure; "
        r"report_failure('x', RuntimeError('\u624b \udcff'), True, Path('.'), None)"
    )

    done = in_c_locale(code, cwd=tmp_path)

    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "RuntimeError: \u624b \\udcff" in (tmp_path / "failure.log").read_text(encoding="utf-8")


def test_what_is_read_and_written_is_utf_8(tmp_path):
    code = r"""
from pathlib import Path
from miles_dmd.files import atomic_write_text
from miles_dmd.students import read_best
Path('best.json').write_bytes('{"name": "\u624b"}'.encode())
assert read_best(Path('.')) == {"name": "\u624b"}
atomic_write_text('x.txt', '\u624b')
"""

    done = in_c_locale(code, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.txt").read_bytes() == "\u624b".encode()


@pytest.mark.parametrize("argument", ["prompt_data", "hf_checkpoint"])
def test_name_that_the_locale_cannot_express_is_refused_with_the_cure(teacher, digit_prompts, tmp_path, argument):
    given = {"hf_checkpoint": str(teacher), "prompt_data": str(digit_prompts), argument: "\u624b.txt"}
    (tmp_path / "mine.yaml").write_text(json.dumps({"args": given}, ensure_ascii=False), encoding="utf-8")
    code = "import sys; from miles_dmd.run import main; sys.exit(main())"

    done = in_c_locale(code, "--config", "mine.yaml", "--dry-run", cwd=tmp_path)

    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "this locale's names are ascii: set PYTHONUTF8=1" in line
