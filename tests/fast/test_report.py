"""The dry run: from configuration files alone, at once and without torch."""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.config.presets import shipped
from miles_dmd.memory import _size
from miles_dmd.plan import UpdateSchedule
from miles_dmd.preflight.rules import resolve
from miles_dmd.report import batch_table, run_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables(asked):
    """title -> its lines, cells separated by one blank, of a run asked for with more flags."""

    def report(*flags):
        blocks = run_tables(resolve(parse_args([*asked, *flags]))).split("\n\n")
        return {block.splitlines()[0]: [" ".join(line.split()) for line in block.splitlines()[1:]] for block in blocks}

    return report


def test_trainers_are_shown_with_what_differs_between_them(tables):
    lines = tables("--critic-lr", "4e-7", "--num-rollout", "10", "--fake-warmup-cycles", "2")["Trainers"]

    assert lines == [
        "critic actor",
        "holds teacher_score, fake_score student, student_ema",
        "trains fake_score student",
        "optimizer steps 60 10",
        "lr 4e-07 1e-05",
    ]


def test_the_schedule_is_drawn_in_a_line(tables):
    lines = tables("--fake-update-ratio", "1", "--fake-warmup-cycles", "1", "--num-rollout", "7")["Schedule"]

    assert lines == [
        "cycle 1 student step, then 1 fake_score step",
        "warm-up 1 cycle of 1 fake_score step",
        "run 7 cycles, one student step each",
    ]


def test_the_rollout_tells_grid_size_and_files(tables, configuration_only):
    lines = tables("--height", "512", "--save", "there")["Rollout"]

    assert "sigmas 1, 0.9, 0.75, 0.5 (shift 3)" in lines
    assert "images 512 x 1024, 256 text tokens" in lines
    assert f"teacher {configuration_only}" in lines
    assert "save there" in lines


def test_options_of_the_loss_type_are_listed(tables):
    assert "teacher_guidance 1.5" in tables("--teacher-guidance", "1.5")["Loss type dmd2"]


def test_batches_are_followed_from_the_phase_to_the_forward(tables):
    lines = tables(
        *("--rollout-batch-size", "24", "--critic-num-trainer-ranks", "2", "--micro-batch-size", "5"),
        *("--num-rollout", "10", "--fake-update-ratio", "3", "--fake-warmup-cycles", "1"),
    )["Batches"]

    assert lines == [
        "batch ranks per rank micro-batches",
        "critic 24 2 12 2 x 5 + 2",
        "actor 24 1 24 4 x 5 + 4",
        "4 batches = 96 samples a cycle; 1,032 samples in the run",  # 24 * (3 * 1 + 10 * 4)
    ]


def test_a_batch_that_is_used_again_is_sampled_once(asked):
    run = resolve(parse_args([*asked, "--rollout-batch-size", "10", "--num-rollout", "2"]))
    student, fake = run.plan.update_schedule.phases
    schedule = UpdateSchedule((student, replace(fake, batch_policy="reuse_student")))

    table = batch_table(replace(run, plan=replace(run.plan, update_schedule=schedule), trainers={"actor": run.args}))

    assert table.note == "1 batch = 10 samples a cycle; 20 samples in the run"


def test_placement_tells_who_shares_a_device(tables):
    lines = tables("--critic-num-trainer-ranks", "4", "--actor-num-trainer-ranks", "2", "--device", "cpu")["Placement"]

    assert lines[:4] == [
        "bundle a rank of each",
        "0 critic, actor, rollout",
        "1 critic, actor",
        "2..3 critic",
    ]
    assert "(cpu), 1/3 of it" in lines[4]


def test_a_local_run_is_placed_in_this_process(tables):
    assert tables("--local")["Placement"][0].startswith("--local everything in this process")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "cpu"), "(cpu)"),
        ((), "(a GPU where the cluster has one, else the CPU)"),
        (("--num-trainer-ranks", "2"),
         "(CPUs where the cluster has no GPU; else GPUs, and with fewer than 2 of them the run is refused)"),
        (("--local",), "everything in this process; a GPU where this machine has one, else the CPU"),
        (("--local", "--device", "cuda"), "everything in this process; cuda"),
    ],
)  # fmt: skip
def test_placement_tells_on_what_it_will_compute(tables, flags, said):
    """As ``cluster.placement.choose_device`` and ``training.compute.choose_compute`` do it."""
    assert said in tables(*flags)["Placement"][-1]


def test_memory_is_estimated_from_the_configuration_where_there_are_no_weights(tables):
    lines = tables("--actor-num-trainer-ranks", "2")["Memory"]

    assert "critic fake_score 2,243,171,520 8.4 GiB 8.4 GiB 16.7 GiB - 864.0 MiB 43.5 GiB" in lines  # with the teacher
    assert "actor student_ema 2,243,171,520 8.4 GiB - - - - 21.7 GiB" in lines  # over two ranks, the table on both
    assert "estimate" in lines[-1]


def test_bf16_computes_with_a_copy(tables):
    lines = tables("--compute-dtype", "bf16")["Memory"]

    assert "actor student 2,243,171,520 8.4 GiB 8.4 GiB 16.7 GiB 4.2 GiB 864.0 MiB" in lines
    assert "rollout student 2,243,171,520 4.2 GiB - - - 864.0 MiB 5.0 GiB" in lines


@pytest.mark.parametrize("preset", [name for name in shipped() if name != "opd_bytes"])  # which has no pipeline
def test_every_shipped_preset_has_a_dry_run_on_configuration_files_alone(tables, preset):
    sections = tables("--config", preset)

    assert sections["Rollout"][2] == "sigmas 1, 0.9, 0.75, 0.5 (shift 3)"
    assert any(line.startswith("warm-up 1 cycle") for line in sections["Schedule"])


def test_memory_is_estimated_from_the_headers_of_weights(asked, latest, teacher):
    text = run_tables(resolve(parse_args(latest([*asked, "--hf-checkpoint", str(teacher)]))))

    assert any(line.split()[:3] == ["actor", "student", "320,960"] for line in text.splitlines())
    assert "lacks the files of" not in text


def test_a_dry_run_says_what_is_missing_for_a_run(tables, configuration_only):
    last = tables()["Memory"][-1]

    assert f"{configuration_only} lacks the files of transformer, vae, tokenizer, " in last
    assert "text_encoder_3: counted from its configuration, and a run refuses it" in last


def test_a_dry_run_says_what_encoded_prompts_take(tables):
    assert any(line.startswith("encoded 15.6 MiB of disk in --cache-dir ") for line in tables()["Rollout"])


def test_a_shift_that_is_not_the_pipelines_is_told(tables):
    assert not any(line.startswith("warning") for line in tables()["Rollout"])
    assert any("scheduler has shift 3; pass --shift 3" in line for line in tables("--shift", "5")["Rollout"])


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "-"), (16384, "16.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_are_shown_in_a_unit_that_leaves_a_number(amount, text):
    assert _size(amount) == text


def test_a_dry_run_answers_at_once_without_torch(asked, tmp_path):
    code = (
        "import sys\nfrom miles_dmd.config.cli import parse_args\nfrom miles_dmd.preflight.rules import resolve\n"
        "from miles_dmd.report import run_tables\n"
        "print(run_tables(resolve(parse_args())))\n"
        "print([name for name in ('torch', 'ray', 'diffusers', 'transformers', 'numpy') if name in sys.modules])"
    )
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    done = subprocess.run(
        [sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert done.stdout.splitlines()[-1] == "[]"
    # seconds of processor, which others who keep a test machine busy do not add to; measured: 0.3
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < 5


def test_the_page_of_flags_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "write_cli_docs.py", "--check"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
