"""Training of the teacher: a StableDiffusion3Pipeline of handwritten digits, from scratch, in minutes.

usage: python examples/digits/make_teacher.py [--out DIR] [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_dmd.files import remove_tree

HERE = Path(__file__).resolve().parent
GUIDANCES = (1.0, 1.5, 2.0, 3.0)  # the card shows what guidance does


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the digits teacher and save it as a pipeline directory.")
    parser.add_argument("--out", type=Path, default=HERE / "teacher", help="pipeline directory to write")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more only pays on idle cores")
    parser.add_argument("--seed", type=int, default=0, help="of weights and noise")
    parser.add_argument("--autoencoder-steps", type=int, default=700, help="optimizer steps of the VAE")
    parser.add_argument("--transformer-steps", type=int, default=3000, help="optimizer steps of the transformer")
    parser.add_argument("--samples", type=int, default=300, help="drawn at the end per guidance for the card; 0: none")
    args = parser.parse_args(argv)
    for name in ("threads", "autoencoder_steps", "transformer_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a whole number from 1 up")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: name a directory")
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / "model_index.json").is_file():
        parser.error(f"--out {args.out} holds something that is not a pipeline: name a new directory")
    return args


def build_pipeline(args: argparse.Namespace, scratch: Path, report: Callable[[str], None]) -> Any:
    """Autoencoder, text encoders, transformer, trained in this order and put together. scratch gets tokenizer files."""
    import torch
    from autoencoder import scaled_latents, train_autoencoder
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
    from digits import PROMPTS, load_digits
    from text import text_components
    from transformer import SHIFT, Recipe, build_transformer, train_transformer

    torch.manual_seed(args.seed)
    ink, labels = load_digits()
    vae = train_autoencoder(ink, args.autoencoder_steps, report)
    pipeline = StableDiffusion3Pipeline(
        transformer=build_transformer(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        **text_components(scratch),
    )
    prompts = [*PROMPTS, ""]
    hidden, _, pooled, _ = pipeline.encode_prompt(
        prompts, prompts, prompts, max_sequence_length=12, do_classifier_free_guidance=False
    )
    latents = scaled_latents(vae, ink)
    recipe = Recipe(steps=args.transformer_steps)
    pipeline.register_modules(transformer=train_transformer(latents, labels, (hidden, pooled), recipe, report))
    return pipeline


def save_pipeline(pipeline: Any, scratch: Path, out: Path) -> None:
    """Write the pipeline whole or not at all, with the tokenizers' original files beside transformers' own."""
    fresh = out.with_name(f".{out.name}-{os.getpid()}")
    fresh.mkdir()
    pipeline.save_pretrained(fresh, safe_serialization=True)
    # Servers that do not read tokenizer.json look for these.
    for file in (*scratch.glob("*/vocab.json"), *scratch.glob("*/merges.txt"), *scratch.glob("*/spiece.model")):
        shutil.copyfile(file, fresh / file.parent.name / file.name)
    if out.is_dir():
        remove_tree(out)
    fresh.rename(out)


def measure(pipeline: Any, samples: int, report: Callable[[str], None]) -> list[str]:
    """Rows of the card's table: what the finished teacher's samples are worth at each guidance."""
    from digits import TEACHER_CALL, load_digits, shipped_classifier, to_image, to_ink
    from evaluate import features_of, judge, sample

    classifier = shipped_classifier()
    data = features_of(classifier, to_ink(to_image(load_digits()[0])))
    rows = []
    for guidance in GUIDANCES:
        ink, labels = sample(pipeline, {**TEACHER_CALL, "guidance_scale": guidance}, samples, seed=0)
        got = judge(classifier, ink, labels, data=data)
        rows.append(f"| {guidance} | {got['accuracy']:.3f} | {got['frechet_data']:.2f} | {got['spread']:.2f} |")
        report(f"guidance {guidance}: {got}")
    return rows


def write_card(pipeline: Any, rows: list[str], samples: int, out: Path) -> None:
    """The model card: what it is, what it learned from, how good it came out."""
    from autoencoder import reconstruction_psnr
    from digits import TEACHER_CALL, load_digits

    count = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    size = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    template = (HERE / "card.md").read_text(encoding="utf-8")
    card = template.format(
        parameters=f"{count:,}",
        megabytes=f"{size / 1e6:.1f}",
        psnr=f"{reconstruction_psnr(pipeline.vae, load_digits()[0][::8]):.1f}",
        guidance=TEACHER_CALL["guidance_scale"],
        samples=samples,
        rows="\n".join(rows),
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    start = time.perf_counter()

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {line}", flush=True)

    import torch
    from digits import ensure_classifier
    from evaluate import open_pipeline

    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report(f"classifier: held-out accuracy {ensure_classifier():.4f}")
    with tempfile.TemporaryDirectory() as scratch:
        save_pipeline(build_pipeline(args, Path(scratch), report), Path(scratch), args.out)
    # What is measured is what was saved.
    pipeline = open_pipeline(args.out)
    rows = measure(pipeline, args.samples, report) if args.samples else []
    write_card(pipeline, rows, args.samples, args.out)
    report(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
