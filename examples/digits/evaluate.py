"""Evaluation of a student: teacher, undistilled baseline and student, measured alike, in one table.

usage: python examples/digits/evaluate.py [--student DIR] [--teacher DIR] [--samples 1000] [--json FILE] [--picture PNG]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd.errors import ConfigError, FormatError
from miles_dmd.modalities.diffusion.distillation import Distillation, read_distillation
from miles_dmd.models.sd3.configs import CLASSES
from miles_dmd.pipelines.fingerprint import fingerprint
from miles_dmd.seeds import derive

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
FORMAT = 1
BATCH = 100
PICTURED = 20
COLUMNS = ("accuracy", "frechet_data", "frechet_teacher", "diversity")


class Refusal(Exception):
    """The user named something that cannot be evaluated: one line, exit code 2."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a distilled digits student against its teacher.")
    parser.add_argument("--student", type=Path, help="exported student directory; without: teacher and baseline only")
    parser.add_argument("--teacher", type=Path, help="pipeline directory of its teacher; without: the shipped one")
    parser.add_argument("--samples", type=int, default=1000, help="per row, a tenth of them for each digit")
    parser.add_argument("--seed", type=int, default=0, help="of the samples' noise")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more only pays on idle cores")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    parser.add_argument("--picture", type=Path, help="draw two samples of each digit and row into this PNG, too")
    args = parser.parse_args(argv)
    if args.samples < 100 or args.samples % 10:
        parser.error(f"--samples {args.samples}: give a multiple of 10 from 100 up")
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: give a whole number from 1 up")
    return args


def read_student(student: Path) -> Distillation:
    """Sampling that a student directory declares. Raises Refusal where there is none, or a newer format."""
    pipeline_directory(student, "--student")
    try:
        return read_distillation(student)
    except (FormatError, ConfigError) as error:
        raise Refusal(f"--student {error}") from error


def defaults() -> Distillation:
    """Sampling of the baseline when there is no student: that of a student of the shipped teacher."""
    from digits import STUDENT_CALL, TEACHER_CALL

    return Distillation(
        sigmas=(1.0, 0.9, 0.75, 0.5),
        solver="renoise",
        teacher="teacher",
        policy_version=0,
        student_call=STUDENT_CALL,
        teacher_call=TEACHER_CALL,
    )


def pipeline_directory(path: Path, flag: str) -> Path:
    if not path.is_dir():
        raise Refusal(f"{flag} {path} is not a directory")
    if not (path / "model_index.json").is_file():
        raise Refusal(f"{flag} {path} is not a pipeline directory: it has no model_index.json")
    return path


def teacher_of(said: Distillation, named: Path) -> Path:
    """Raises Refusal unless ``named`` is the teacher that the student was distilled from."""
    pipeline_directory(named, "--teacher")
    if said.teacher_sha256 not in ("", fingerprint(named, CLASSES)):
        raise Refusal(
            f"--teacher {named} is not the teacher of this student, {said.teacher}: name the pipeline directory that "
            "it was distilled from"
        )
    return named


def open_pipeline(path: Path) -> Any:
    """The pipeline, without progress bars."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    for logging in (of_diffusers, of_transformers):
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # before the pipeline's own import, which warns of image processors not needed
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def student_scheduler(teacher: Any, solver: str) -> Any:
    """The scheduler that a student of this solver carries, with the teacher's shift. Raises Refusal for others."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

    kinds = {"renoise": FlowMatchLCMScheduler, "euler": FlowMatchEulerDiscreteScheduler}
    if solver not in kinds:
        raise Refusal(f"distillation.json names solver {solver!r}, known are {', '.join(kinds)}")
    return kinds[solver](shift=teacher.scheduler.config.shift)


def sample(pipeline: Any, call: dict[str, Any], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ink [count, 8, 8] and labels [count] (0, 1, .. 9, 0, ..) of samples drawn with these keyword arguments.

    Repeats exactly for a seed: sample i's initial latents come from a generator of its own. A re-noising scheduler
    takes its noise from torch's global generator (the pipeline hands it none): that one is seeded for each batch, with
    a seed that no sample has. With the seed of a sample it would repeat that one's initial noise as its fresh noise.
    """
    import torch
    from digits import PROMPTS, to_ink

    labels = torch.arange(count) % len(PROMPTS)
    parts = []
    for first in range(0, count, BATCH):
        rows = range(first, min(first + BATCH, count))
        torch.manual_seed(derive(seed, "fresh noise", first))
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in rows]
        prompts = [PROMPTS[labels[i]] for i in rows]
        images = pipeline(prompts, generator=generators, output_type="pt", **call).images
        parts.append(to_ink(images * 2 - 1))
    return torch.cat(parts), labels


def grid_of(pipeline: Any) -> list[float]:
    """The noise levels of the last sampling, as the network saw them, without the final 0."""
    return [round(sigma, 4) for sigma in pipeline.scheduler.sigmas[:-1].tolist()]


def features_of(classifier: Any, ink: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        return classifier.features(ink)


def judge(classifier: Any, ink: Tensor, labels: Tensor, **references: Tensor) -> dict[str, float]:
    """Accuracy, spread, and the Frechet distance to each reference's features, as frechet_<name>."""
    from digits import accuracy, frechet_distance, spread

    features = features_of(classifier, ink)
    distances = {f"frechet_{name}": frechet_distance(features, other) for name, other in references.items()}
    return {"accuracy": accuracy(classifier, ink, labels), "spread": spread(ink, labels), **distances}


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """{row: {column: value}} for the data, the teacher, the teacher on other seeds, the baseline and the student.

    The teacher's own samples (seed) are the reference; every other row is drawn on other noise (seed + 1), so that
    "teacher, other seeds" is the floor that a perfect student would reach.
    """
    from digits import load_digits, shipped_classifier, to_image, to_ink

    said = read_student(args.student) if args.student else defaults()
    teacher = open_pipeline(teacher_of(said, args.teacher or HERE / "teacher"))
    scheduler = student_scheduler(teacher, said.solver)
    classifier = shipped_classifier()
    ink, labels = load_digits()
    ink = to_ink(to_image(ink))

    def drawn(row: str, pipeline: Any, call: Mapping[str, Any], seed: int) -> tuple[Tensor, Tensor]:
        print(f"{row}: {args.samples} samples", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        samples = sample(pipeline, dict(call), args.samples, seed)
        print(f" in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        return samples

    reference = drawn("teacher", teacher, said.teacher_call, args.seed)
    sets = {"data": (ink, labels), "teacher": reference}
    sets["teacher, other seeds"] = drawn("teacher, other seeds", teacher, said.teacher_call, args.seed + 1)
    teacher.scheduler = scheduler
    sets["baseline"] = drawn("baseline", teacher, said.student_call, args.seed + 1)
    grid = grid_of(teacher)
    if args.student:
        student = open_pipeline(args.student)
        sets["student"] = drawn("student", student, said.student_call, args.seed + 1)
        grid = grid_of(student)
    if any(abs(a - b) > 1e-3 for a, b in zip(grid, said.sigmas, strict=True)):
        raise Refusal(f"student_call samples at {grid}, distillation.json says {list(said.sigmas)}: export it again")
    known = {"data": features_of(classifier, ink), "teacher": features_of(classifier, reference[0])}
    rows = {name: judge(classifier, *samples, **known) for name, samples in sets.items()}
    for row in rows.values():
        row["diversity"] = row["spread"] / rows["teacher"]["spread"]
    if args.picture is not None:
        steps = {"teacher": said.teacher_call, "baseline": said.student_call, "student": said.student_call}
        titles = {name: f"{name}, {call['num_inference_steps']} steps" for name, call in steps.items() if name in sets}
        draw({title: sets[name][0] for name, title in titles.items()}, args.picture)
    return {"format": FORMAT, "samples": args.samples, "seed": args.seed, "sigmas": grid, "rows": rows}


def draw(rows: Mapping[str, Tensor], path: Path) -> None:
    """The first PICTURED samples of each row, ink [N, 8, 8], two of each digit: a row each, under its name."""
    import torch

    from miles_dmd.observe.pictures import sample_grid

    ink = torch.cat([samples[:PICTURED] for samples in rows.values()])
    images = (255 * ink.clamp(0, 1)).round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3)
    labels = [name if column == 0 else "" for name in rows for column in range(PICTURED)]
    sample_grid(images.numpy(), path, labels=labels, columns=PICTURED)


def table(result: dict[str, Any]) -> str:
    """The numbers as a person reads them."""
    head = f"{'':22s}" + "".join(f"{name:>17s}" for name in COLUMNS)
    lines = [
        f"{name:22s}" + "".join(f"{row[column]:17.3f}" for column in COLUMNS) for name, row in result["rows"].items()
    ]
    rows = result["rows"]
    if "student" in rows:
        ratio = rows["student"]["frechet_teacher"] / rows["baseline"]["frechet_teacher"]
        lines.append(f"student / baseline, Frechet distance to the teacher: {ratio:.2f}")
    return "\n".join([head, *lines])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        for path, flag in ((args.student, "--student"), (args.teacher, "--teacher")):
            if path is not None:
                pipeline_directory(path, flag)
        for path, flag in ((args.json, "--json"), (args.picture, "--picture")):
            if path is not None and not path.parent.is_dir():
                raise Refusal(f"{flag} {path}: its directory does not exist")
        if args.student is not None:
            read_student(args.student)
        import torch

        torch.set_num_threads(args.threads)
        result = evaluate(args)
    except Refusal as refusal:
        print(f"evaluate.py: {refusal}", file=sys.stderr)
        return 2
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
