"""Arbitrary input, on a command line, in a preset or in a pipeline's files: a run or a refusal, and nothing else."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_dmd.config.args import Args
from miles_dmd.config.cli import parse_args
from miles_dmd.config.flags import flags_of
from miles_dmd.config.nested import KEYS, OF_EVERY_LOSS, settings_that_run
from miles_dmd.config.trainers import TrainerConfig, compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import kinds
from miles_dmd.engines.sglang import engine as sglang
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import Options
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.models.sd3.configs import Scheduler, Transformer
from miles_dmd.pipelines.components import T5, Clip, Vae
from miles_dmd.preflight.rules import resolve
from miles_dmd.report import run_tables

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(
        [10**9, 2**63, "", "1", "1e5", "-1", "nan", "dmd2", "sd3", "digits", "actor", "critic", "\0", "\ud800", "a/b"]
    )
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
NAMES = st.sampled_from(sorted({*kinds(Args), *kinds(Options)}))
every = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def held(work):
    """``work`` is done, or refused in one line; any other error is the test's."""
    try:
        work()
    except ConfigError as refused:
        assert str(refused).isprintable()  # noqa: PT017 - there are no refusals that must come


def tables(words):
    args = parse_args(words)
    return run_tables(resolve(args))


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


READ = [
    *(("transformer/config.json", name) for name in kinds(Transformer)),
    *(("vae/config.json", name) for name in kinds(Vae)),
    *(("scheduler/scheduler_config.json", name) for name in kinds(Scheduler)),
    *((f"tokenizer{n}/tokenizer_config.json", "model_max_length") for n in ("", "_2", "_3")),
    *((f"text_encoder{n}/config.json", name) for n in ("", "_2") for name in kinds(Clip)),
    *(("text_encoder_3/config.json", name) for name in kinds(T5)),
    *(("model_index.json", name) for name in ("_class_name", "vae", "odd")),
    ("vae/diffusion_pytorch_model.safetensors.index.json", "weight_map"),
]


@every
@given(place=st.sampled_from(READ), value=VALUES)
def test_of_a_pipelines_files(asked, configuration_only, place, value):
    path = configuration_only / place[0]
    content = path.read_text() if path.exists() else '{"weight_map": {"a": "b.safetensors"}}'
    path.write_text(json.dumps({**json.loads(content), place[1]: value}))

    held(lambda: tables(asked))

    path.write_text(content)


def named(names, values=VALUES):
    return st.dictionaries(st.sampled_from(sorted(names)), values, min_size=1, max_size=2)


ROLES = st.sampled_from(["critic", "actor"])
DOCUMENTS = st.one_of(
    named(["args", "trainers", *KEYS, "odd"]),
    named(["args"], named({*kinds(Args), *kinds(Options)})),
    named(["args"], named({*kinds(Args), *kinds(Options)}, SCALARS)),
    named(["trainers"], st.lists(named(["role", "overrides", "odd"]), max_size=2)),
    named(
        ["trainers"], st.tuples(st.fixed_dictionaries({"role": ROLES, "overrides": named({*kinds(Args)})})).map(list)
    ),
    named(["algorithm"], named(["trainer_type", "odd"])),
    named(["actor_rollout_ref"], named(["model", "odd"], VALUES | named(["path", "odd"]))),
    named(["distillation"], named(["enabled", "distribution_matching", "odd"])),
    named(["distillation"], named(["distribution_matching"], named({*OF_EVERY_LOSS, *settings_that_run()}))),
    named(["distillation"], named(["distribution_matching"], named({*OF_EVERY_LOSS, *settings_that_run()}, SCALARS))),
)


@every
@given(document=DOCUMENTS | VALUES)
def test_of_a_preset(asked, tmp_path, in_an_empty_folder, document):
    path = tmp_path / "any.yaml"
    path.write_bytes(yaml.safe_dump(document).encode("utf-8", "surrogatepass"))

    held(lambda: tables([*asked, "--config", str(path)]))


FLAGS = sorted({*flags_of("dmd2", dmd2, "sglang", sglang)} - {"--load"})
TEXTS = SCALARS.map(str) | st.sampled_from(["sglang", "inprocess", "/dev/null", "/dev/zero", "9" * 40, "9" * 5000])
PAIRS = st.tuples(st.sampled_from(FLAGS), TEXTS)


@every
@given(pairs=st.lists(PAIRS, min_size=1, max_size=2), rest=st.lists(TEXTS, max_size=1))
def test_of_a_command_line(asked, latest, in_an_empty_folder, pairs, rest):
    held(lambda: tables(latest([*asked, *map("=".join, pairs), *rest])))


@every
@given(name=NAMES | st.sampled_from(["loss_options", "engine_options", "trainers"]), value=VALUES)
def test_of_arguments_that_a_program_makes(configuration_only, prompt_file, in_an_empty_folder, name, value):
    given = {"hf_checkpoint": str(configuration_only), "prompt_data": str(prompt_file), "dry_run": True}

    def make():
        args = Args(**{**given, **({name: value} if name not in kinds(Options) else {})})
        run_tables(resolve(args))

    held(make)
    held(lambda: compute_trainer_args(Args(**given), TrainerConfig("critic", {name: value})))
    held(lambda: [compute_trainer_configs(Args(**given, trainers=value)), TrainerConfig(value, value)])
