"""Whole runs: in one process, and through Ray, which must give the same numbers."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from miles_dmd.errors import ExternalDataError
from miles_dmd.modalities.diffusion.distillation import read_distillation
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.prompts import PromptSource
from miles_dmd.run import DistillationTrainer, main, started_run
from miles_dmd.students import describe
from miles_dmd.training.shard import local

LOSSES = ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "actor/normalizer")


def losses(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return [(row["cycle"], name, row[name]) for row in rows for name in LOSSES if name in row]


@pytest.fixture(scope="module")
def reference(make_args, tmp_path_factory):
    """Three cycles in this process; the runs that others are compared with."""
    directory = tmp_path_factory.mktemp("local")
    trainer = DistillationTrainer(make_args("--local", "--sample-prompts", "2", "--save", str(directory)))
    trainer.fit()
    return directory, trainer


def test_run_leaves_what_it_promises(reference):
    directory, _ = reference

    left = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}

    assert {
        "metrics.jsonl", "summary.json", "trace.json", "curves.png", "samples/step_000000.png",
        "samples/step_000002.png", "student/model_index.json", "student/distillation.json",
    } <= left  # fmt: skip
    for picture in ("curves.png", "samples/step_000000.png"):
        with Image.open(directory / picture) as image:
            assert min(image.size) > 200
    names = {event["name"] for event in json.loads((directory / "trace.json").read_text())["traceEvents"]}
    assert {"rollout", "critic train", "score", "actor train", "weight sync", "save"} <= names


def test_summary_counts_exactly_what_was_asked(reference):
    directory, _ = reference

    summary = json.loads((directory / "summary.json").read_text())

    assert summary["counters"]["optimizer_steps"] == {"fake_score": 6, "student": 2}  # K=2, one warm-up cycle
    assert summary["policy_version"] == 2
    assert set(summary["peak_memory_bytes"]) == {"actor", "critic", "rollout"}
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["global_step"] for row in rows] == [0, 1, 2]
    assert {"critic/loss.0", "critic/loss.1", "time/rollout", "actor/ema_decay"} <= rows[1].keys()


def test_student_retakes_the_very_step_that_was_sampled(reference):
    directory, _ = reference

    drift = [
        row["actor/rollout_drift"] for row in read_metrics(directory / "metrics.jsonl") if "actor/rollout_drift" in row
    ]

    assert len(drift) == 2
    assert max(drift) < 1e-5


def test_teacher_is_left_as_it_was(reference, teacher):
    _, trainer = reference
    stored = load_file(teacher / "transformer" / "diffusion_pytorch_model.safetensors")

    held = trainer.executor._groups["critic"].trainer.models["teacher_score"].network

    for name, value in held.named_parameters():
        assert torch.equal(local(value), stored[name].float()), name


def test_exported_pipeline_reproduces_the_trainers_sample(reference):
    """Stock diffusers, the exported directory, and ``student_call``: the same latents as the run's own sampler."""
    from diffusers import StableDiffusion3Pipeline

    from miles_dmd.modalities.diffusion.requests import DenoisingRequest

    directory, trainer = reference
    distillation = read_distillation(directory / "student")
    pipeline = StableDiffusion3Pipeline.from_pretrained(directory / "student")
    pipeline.set_progress_bar_config(disable=True)
    engine = trainer.executor._rollouts.engine
    shape = engine.shape
    prompt_id, seed = 3, 1234

    with trainer.executor.averaged_weights():
        ours = engine.sample([DenoisingRequest(0, prompt_id, seed, 3)])
    torch.manual_seed(seed)
    prompt = trainer.batch_provider.prompts.texts[prompt_id]
    theirs = pipeline(prompt, latents=torch.randn(1, *shape), output_type="latent", **distillation.student_call).images

    torch.testing.assert_close(pipeline.scheduler.sigmas, torch.tensor([*distillation.sigmas, 0.0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def other_weights(teacher, tmp_path_factory):
    """The teacher with a transformer that is a little different."""
    directory = tmp_path_factory.mktemp("other") / "student"
    shutil.copytree(teacher, directory)
    path = directory / "transformer" / "diffusion_pytorch_model.safetensors"
    generator = torch.Generator().manual_seed(0)
    stored = load_file(path)
    save_file({n: v + 0.05 * torch.randn(v.shape, generator=generator) for n, v in stored.items()}, path)
    return directory


def test_rollouts_start_from_the_students_own_weights(make_args, other_weights, tmp_path):
    own = ("--actor-hf-checkpoint", str(other_weights), "--fake-warmup-cycles", "0", "--num-rollout", "1")

    trainer = DistillationTrainer(make_args("--local", *own, "--save", str(tmp_path)))
    trainer.fit()

    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["actor/rollout_drift"] < 1e-5
    assert trainer.plan.role_layout.groups[1].model_ref == str(other_weights)


def test_a_trainer_computes_in_its_own_dtype_in_one_process_too(resolved):
    run = resolved("--local", "--critic-compute-dtype", "bf16")

    with started_run(run, PromptSource(run.prompts, 0).texts) as started:
        dtypes = {name: group.trainer.compute.dtype for name, group in started.groups.items()}
        engine = started.rollouts.compute.dtype

    assert (dtypes, engine) == ({"critic": torch.bfloat16, "actor": torch.float32}, torch.float32)


def test_what_only_libraries_find_wrong_with_a_checkpoint_is_one_line_and_no_run(flags, teacher, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    path = copy / "tokenizer_3" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": {"type": "Nonsense"}}))

    status = main(flags("--local", "--hf-checkpoint", str(copy), "--save", str(tmp_path / "run")))

    said = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert (status, len(said)) == (2, 1), said
    assert f"{copy}: its tokenizers cannot be opened (" in said[0]
    assert not (tmp_path / "run").exists()


def test_what_the_teacher_is_told_not_to_draw_is_part_of_its_call(resolved):
    plain, negative = (describe(resolved(*more), 0) for more in ((), ("--negative-prompt", "blurry")))

    assert "negative_prompt" not in plain.teacher_call
    assert negative.teacher_call["negative_prompt"] == "blurry"
    assert plain.teacher == "teacher"


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_one_student_step_then_exactly_k_fake_score_steps(make_args, tmp_path, ratio):
    args = make_args("--local", "--fake-update-ratio", str(ratio), "--save", str(tmp_path))
    trainer = DistillationTrainer(args)

    controller = trainer.fit(num_cycles=2)  # one of warm-up, one normal

    assert controller.counters.optimizer_steps == {"fake_score": 2 * ratio, "student": 1}
    groups = trainer.executor._groups
    assert steps_taken(groups["critic"]) == {2 * ratio}
    assert steps_taken(groups["actor"]) == {1}


def steps_taken(group):
    (trained,) = group.trainer.trained.values()
    return {int(state["step"]) for state in trained.optimizer.adamw.state.values()}


def test_stale_batch_is_refused(reference):
    _, trainer = reference
    request = trainer.plan.update_schedule.next_cycle(trainer.controller_instance.counters).requests[0]
    batch = trainer.batch_provider.next(request)
    trainer.executor.policy_version += 1

    with pytest.raises(ExternalDataError, match="sampled by policy version 2; the student is at 3"):
        trainer.executor.execute_phase(request, batch)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--num-trainer-ranks", "2"),
        ("--critic-num-trainer-ranks", "2", "--micro-batch-size", "1"),
    ],
    ids=["one rank", "two ranks", "groups of different sizes, four micro-batches"],
)
def test_ray_run_equals_the_local_run(reference, make_args, ray_cluster, tmp_path, more):
    trainer = DistillationTrainer(make_args("--save", str(tmp_path), *more))

    trainer.fit()

    expected, found = losses(reference[0]), losses(tmp_path)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    apart = [(*place, abs(value - other) / value) for (*place, value), (*_, other) in zip(expected, found, strict=True)]
    assert [entry for entry in apart if entry[-1] > 1e-5] == []
    # the engine got the student's weights, and the export is the same student
    ours = load_file(reference[0] / "student" / "transformer" / "diffusion_pytorch_model.safetensors")
    theirs = load_file(tmp_path / "student" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, value in ours.items():
        # Adam's first steps are as long for a gradient of rounding as for a real one, so single weights may differ
        assert (value - theirs[name]).abs().mean() < 1e-6, name


def test_command_line_says_where_the_student_is(flags, tmp_path, capsys):
    status = main(flags("--local", "--num-rollout", "1", "--save", str(tmp_path)))

    shown = capsys.readouterr()
    assert status == 0
    assert f"Student: {tmp_path / 'student'}" in shown.out
    assert "Time by phase" in shown.out
    assert "cycle 2/2" in shown.err
