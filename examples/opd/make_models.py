"""Training of teacher and student: two byte-level Llamas, from scratch, on Python's help topics, in minutes.

usage: python examples/opd/make_models.py [--out DIR] [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd.files import remove_tree

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
WINDOW, BATCH = 96, 16
"""Tokens of a training window, and windows of a step."""
WARMUP = 20
PROMPTS, HELD_OUT = 512, 64


@dataclass(frozen=True)
class Size:
    """One of the two Llamas."""

    width: int
    inner: int
    heads: int
    steps: int
    tied: bool


SIZES = {
    "teacher": Size(width=96, inner=256, heads=4, steps=350, tied=False),
    "student": Size(width=48, inner=128, heads=4, steps=120, tied=True),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the byte-level teacher and student of on-policy distillation.")
    parser.add_argument("--out", type=Path, default=HERE, help="directory in which teacher, student and prompts go")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more only pays on idle cores")
    parser.add_argument("--seed", type=int, default=0, help="of weights, windows and prompts")
    parser.add_argument("--teacher-steps", type=int, default=SIZES["teacher"].steps, help="optimizer steps")
    parser.add_argument("--student-steps", type=int, default=SIZES["student"].steps, help="optimizer steps")
    args = parser.parse_args(argv)
    for name in ("threads", "teacher_steps", "student_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a whole number from 1 up")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: name a directory")
    for name in SIZES:
        place = args.out / name
        if place.exists() and not (place / "config.json").is_file():
            parser.error(f"--out {args.out}: {place} is no model, and would be replaced: name another directory")
    return args


def build(size: Size) -> Any:
    """The Llama of this size, with new weights."""
    from text import BYTES, END_ID
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES + 1,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=2,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    return LlamaForCausalLM(config)


def train(model: Any, tokens: Tensor, steps: int, seed: int, report: Callable[[str], None]) -> None:
    """Next-token prediction on random windows, AdamW, learning rate rising to 4e-3, then falling to 0 by a cosine."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    offsets = torch.arange(WINDOW)
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH, 1), generator=generator)
        windows = tokens[starts + offsets]
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            report(f"step {step}: {loss.item():.3f} nats a token")


def held_out_loss(model: Any, tokens: Tensor) -> float:
    """Nats a token of the held-out topics."""
    import torch

    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss * len(part) for part in windows.split(64)]
    return float(sum(losses) / len(windows))


def save(model: Any, place: Path) -> None:
    """Write model and tokenizer whole or not at all."""
    from text import byte_tokenizer

    fresh = place.with_name(f".{place.name}-{os.getpid()}")
    fresh.mkdir()
    model.save_pretrained(fresh)
    byte_tokenizer().save_pretrained(fresh)
    if place.is_dir():
        remove_tree(place)
    fresh.rename(place)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    start = time.perf_counter()

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {line}", flush=True)

    import torch
    from text import documents, encoded, prompts, write_prompts

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    inside, outside = documents()
    write_prompts(args.out / "prompts.jsonl", prompts(inside, PROMPTS, args.seed))
    write_prompts(args.out / "held_out.jsonl", prompts(outside, HELD_OUT, args.seed))
    seen, unseen = (torch.tensor(encoded(texts)) for texts in (inside, outside))
    for name, size in SIZES.items():
        torch.manual_seed(args.seed)
        model = build(size)
        report(f"{name}: {sum(value.numel() for value in model.parameters()):,} parameters")
        train(model, seen, getattr(args, f"{name}_steps"), args.seed, report)
        report(f"{name}: {held_out_loss(model.eval(), unseen):.3f} nats a token on held-out topics")
        save(model, args.out / name)
    report(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
