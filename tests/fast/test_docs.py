"""The pages keep what they say: links lead somewhere, flags exist, snippets run, quotations and listings are true."""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.config.flags import flag_name, flags_of
from miles_dmd.config.values import kinds

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
FOREIGN = (
    {"--help", "--name", "--no-name", "--flag"},
    {"--local-dir", "--exclude", "--include", "--content", "--draft"},
    {"--tp-size", "--model-path", "--model-id", "--component-paths", "--host", "--port", "--warmup-mode", "--no-deps"},
    {"--component-residency", "--dit-precision", "--vae-precision", "--text-encoder-precisions", "--strict-ports"},
    {"--sleep-on-idle", "--log-level", "--por"},
    {"--address", "--generate", "--head"},
    {"--dtype", "--sampling-backend", "--grammar-backend", "--skip-tokenizer-init", "--skip-server-warmup"},
    {"--enable-memory-saver", "--attention-backend", "--disable-overlap-schedule", "--disable-cuda-graph"},
    {"--max-total-tokens", "--max-running-requests", "--enable-deterministic-inference"},
)
"""Placeholders and what argparse adds; flags of `hf`, `towncrier`, `sglang serve` and `pip`, and `ray`."""
SMALLEST = {
    "--local": None, "--device": "cpu", "--num-rollout": "1", "--rollout-batch-size": "4", "--micro-batch-size": "4",
    "--fake-update-ratio": "1", "--sample-prompts": "1",
}  # fmt: skip
MAIN = ROOT / "miles_dmd" / "__main__.py"
SCRIPTS = ("examples/*/*.py", "benchmarks/*.py", "scripts/*.py", "sglang_plugin/*/*.py")
"""What has a command line of its own, beside MAIN."""
MARKED = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    """(mark, body) of the page's blocks in that language."""
    found = MARKED.finditer((ROOT / page).read_text())
    return [(block["mark"] or "", block["body"]) for block in found if block["language"] == language]


def marked(mark):
    """[page, body] of every Python block with that mark."""
    return [
        pytest.param(name_of(page), body, id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, (found, body) in enumerate(blocks(name_of(page), "python"))
        if found == mark
    ]


def smallest(cache_dir):
    words = [word for pair in SMALLEST.items() for word in pair if word is not None]
    return [*words, "--cache-dir", str(cache_dir)]


def run(page, body):
    exec(compile(body, page, "exec"), {"__name__": "snippet"})


# -- links and flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())

    missing = [target for target, anchor in links if not leads_somewhere(page, target, anchor)]

    assert missing == []


def leads_somewhere(page, target, anchor):
    path = page.parent / target if target else page
    return path.exists() and (not anchor or anchor in anchors(path))


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()

    assert [path.name for path in ROOT.glob("docs/*.md") if f"](docs/{path.name})" not in text] == []


@cache
def known_flags():
    known = set().union(*FOREIGN)
    for name in registry.names("losses"):
        loss_type = registry.load("losses", name)
        for flag in flags_of(name, loss_type).values():
            known |= {flag.name, f"--no-{flag.name[2:]}"} if flag.kind.type is bool else {flag.name, flag.alias}
    for name in registry.names("engines"):
        known |= {flag_name(option) for option in kinds(registry.load("engines", name).options)}
    for script in [MAIN, *(path for place in SCRIPTS for path in ROOT.glob(place))]:
        known |= set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", script.read_text()))
    return known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_of_a_page_exist(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"^<!--.*-->$", "", page.read_text(), flags=re.M)))

    known = known_flags()
    families = {name for name in named if name.endswith("-") and any(flag.startswith(name) for flag in known)}
    assert named - known - families == set()


def commands():
    for page in PAGES:
        for _, body in blocks(name_of(page), "bash"):
            for line in body.splitlines():
                if found := re.search(r"(?:python train_diffusion.py|miles-dmd train) .*", line):
                    yield pytest.param(found[0], id=f"{name_of(page)}: {found[0][16:79]}")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_preset.yaml").write_text(blocks("docs/your_model.md", "yaml")[0][1])

    args = parse_args(shlex.split(command)[2:])

    assert args.loss_type in registry.names("losses") or "." in args.loss_type


@pytest.mark.parametrize(
    "text", [pytest.param(body, id=name_of(page)) for page in PAGES for _, body in blocks(name_of(page), "yaml")]
)
def test_yaml_is_a_preset(text, tmp_path):
    path = tmp_path / "preset.yaml"
    path.write_text(text)

    args = parse_args(["--config", str(path)])

    assert args.lr == yaml.safe_load(text)["args"]["lr"]


# -- snippets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_says_how_it_is_checked(page):
    ways = r"run: (anywhere|in a fresh directory|after digits|after your model)|file: \S+|quoted from \S+"
    elsewhere = ("docs/control_plane.md", "examples/digits/teacher/README.md")

    marks = [] if name_of(page) in elsewhere else [mark for mark, _ in blocks(name_of(page), "python")]

    assert [mark for mark in marks if not re.fullmatch(ways, mark)] == []


@pytest.mark.parametrize(("page", "body"), marked("run: anywhere"))
def test_snippet_runs(page, body):
    run(page, body)


@pytest.mark.parametrize(("page", "body"), marked("run: in a fresh directory"))
def test_snippet_runs_in_a_fresh_directory(page, body, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where encoded prompts go

    run(page, body)


@pytest.fixture(scope="module")
def after_digits(cache_dir, tmp_path_factory):
    """Directory in which the README's command was run, with small sizes."""
    from miles_dmd.run import main

    directory = tmp_path_factory.mktemp("digits")
    line = next(line for _, body in blocks("README.md", "bash") for line in body.splitlines() if "train_dif" in line)
    words = shlex.split(line[line.index("train_diffusion.py") :])[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main([*words, *smallest(cache_dir)]) == 0
    return directory


@pytest.mark.parametrize(("page", "body"), marked("run: after digits"))
def test_snippet_runs_after_the_main_job(page, body, after_digits, monkeypatch):
    monkeypatch.chdir(after_digits)

    run(page, body)


def test_loss_type_of_the_architecture_page_trains(cache_dir, tmp_path, monkeypatch):
    from miles_dmd.observe.metrics import read_metrics
    from miles_dmd.run import main

    for mark, body in blocks("docs/architecture.md", "python"):
        if mark.startswith("file: "):
            path = tmp_path / mark.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--config", "digits", "--loss-type", "my_lab.regression", "--save", str(tmp_path / "run")]

    status = main([*words, *smallest(cache_dir)])

    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
    assert status == 0
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["actor/loss"] > 0
    assert "actor/teacher_critic_gap" not in last


# -- quotations and listings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quotations_are_verbatim(page):
    quoted = [(mark.split()[-1], body) for mark, body in blocks(name_of(page), "python") if mark.startswith("quoted")]

    assert [source for source, body in quoted if body not in (ROOT / source).read_text()] == []


def test_floors_of_the_architecture_page_are_those_that_are_checked():
    contract = (ROOT / ".importlinter").read_text()
    layers = re.search(r"^layers =\n((?:    .+\n)+)", contract, re.MULTILINE)[1]

    assert layers in (ROOT / "docs" / "architecture.md").read_text()


def test_every_metric_of_a_run_has_a_row(after_digits):
    from miles_dmd.observe.metrics import read_metrics

    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = read_metrics(after_digits / "runs" / "digits-1" / "metrics.jsonl")

    keys = {re.sub(r"\.\d+$", "", key) for row in rows for key in row}

    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_every_file_of_a_run_has_a_row(after_digits):
    page = (ROOT / "docs" / "metrics.md").read_text()

    left = [path.name for path in (after_digits / "runs" / "digits-1").iterdir()]

    assert [name for name in left if f"`{name}" not in page] == []


@pytest.mark.parametrize("number", [0, 1])
def test_dry_run_of_sd35_medium_prints_what_its_page_shows(number, configuration_only, tmp_path, monkeypatch, capsys):
    from miles_dmd.run import main

    page = "examples/sd35_medium/README.md"
    command = [body for mark, body in blocks(page, "bash") if mark == "dry run"][number]
    shown = [body for _, body in blocks(page, "text")][number]
    monkeypatch.chdir(tmp_path)
    configuration_only.rename(tmp_path / "sd35_medium")
    Path("prompts.txt").write_text("a red cube\na blue ball\n")

    status = main(shlex.split(command)[2:])

    assert status == 0
    assert shown in capsys.readouterr().out


def test_shown_sources_of_the_sd35_preset_are_its_values():
    """The table's flags are arguments that the preset sets."""
    table = (ROOT / "examples" / "sd35_medium" / "README.md").read_text().split("### Where the numbers come from")[1]
    named = re.findall(r"`--([\w-]+)`", table.split("Sources with links")[0])
    preset = yaml.safe_load((ROOT / "trainer_configs" / "sd35_medium_dmd2.yaml").read_text())
    given = {name for own in (preset["args"], *(row["overrides"] for row in preset["trainers"])) for name in own}

    assert [flag for flag in named if flag.replace("-", "_") not in given] == []
