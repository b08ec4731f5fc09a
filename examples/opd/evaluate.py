"""Evaluation of students by the exact reverse KL to their teacher, on their own responses to held-out prompts.

usage: python examples/opd/evaluate.py [--student DIR ...] [--teacher DIR] [--rollouts 256] [--json FILE]

Of every token that a student samples, KL(student || teacher) over the whole vocabulary, in fp32; their mean over all
tokens, in nats. Sampled at temperature 1 and full support, as in training, with seeds of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from miles_dmd import registry, seeds
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.errors import ConfigError

BATCH = 64


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure language students against their teacher.")
    parser.add_argument("--student", type=Path, nargs="+", default=[], help="exported student directories")
    parser.add_argument(
        "--start", type=Path, default=Path("examples/opd/student"), help="the student before its training"
    )
    parser.add_argument(
        "--teacher", type=Path, default=Path("examples/opd/teacher"), help="model directory of the teacher"
    )
    parser.add_argument(
        "--prompts", type=Path, default=Path("examples/opd/held_out.jsonl"), help="prompts, a JSON object a line"
    )
    parser.add_argument("--rollouts", type=int, default=256, help="responses of each, over all prompts in turn")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of a response")
    parser.add_argument("--seed", type=int, default=1, help="of the responses")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more only pays on idle cores")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    args = parser.parse_args(argv)
    for name in ("rollouts", "max_new_tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a whole number from 1 up")
    return args


def measure(student: Path, teacher: Path, args: argparse.Namespace) -> dict[str, float]:
    """Mean reverse KL, forward KL and length of the student's responses. Raises ConfigError for what is no model."""
    import torch

    from miles_dmd.modalities.language.model import LanguageModel
    from miles_dmd.modalities.language.options import LanguageOptions
    from miles_dmd.modalities.language.prompts import prompt_tokens
    from miles_dmd.modalities.language.sampler import sampled_batch
    from miles_dmd.network.pretrained import load_network
    from miles_dmd.prompts import read_prompts

    family = registry.load("models", "causal_lm")
    for directory in (student, teacher):
        family.require(directory, weights=True)
    family.require_alike(student, "--teacher", teacher, None)
    models = [load_network(family, directory).requires_grad_(False) for directory in (student, teacher)]
    tokenizer = family.code().open_tokenizer(student)
    prompts = prompt_tokens(tokenizer, read_prompts(args.prompts), LanguageOptions())
    asked = [
        RolloutRequest(n, n % len(prompts), seeds.derive(args.seed, "evaluation", n)) for n in range(args.rollouts)
    ]
    reverse = forward = tokens = 0.0
    for start in range(0, len(asked), BATCH):
        batch = sampled_batch(
            models[0], prompts, asked[start : start + BATCH], max_new_tokens=args.max_new_tokens,
            end_ids=family.code().end_tokens(student), version=0, run_seed=args.seed, device=torch.device("cpu"),
        )  # fmt: skip
        with torch.no_grad():
            p, q = (LanguageModel(model).response_logits(batch).float().log_softmax(-1) for model in models)
        reverse += (p.exp() * (p - q)).sum().item()
        forward += (q.exp() * (q - p)).sum().item()
        tokens += batch.weight
    return {"reverse_kl": reverse / tokens, "forward_kl": forward / tokens, "tokens": tokens}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':28}{'reverse KL':>12}{'forward KL':>12}{'tokens':>9}"]
    lines += [
        f"{name:28}{row['reverse_kl']:12.3f}{row['forward_kl']:12.3f}{row['tokens']:9,.0f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    import torch

    torch.set_num_threads(args.threads)
    rows: dict[str, dict[str, Any]] = {}
    try:
        for student in (args.start, *args.student):
            rows[str(student)] = measure(student, args.teacher, args)
    except (ConfigError, OSError) as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
