"""Rollout throughput, bytes and forwards per sample: in process against an SGLang server, stop or capture.

    python benchmarks/rollout.py --sglang-python .sglang-venv/bin/python   # starts a server on this machine
    python benchmarks/rollout.py --sglang-url http://127.0.0.1:30000       # or asks one that is there

Stop steps are spread evenly over the N steps, as --stop-step-policy stratified draws them. Variants run in turn,
so that a busy moment of the machine hits all of them alike. Forwards of a server that stops are what it counted itself.
"""

import argparse
import contextlib
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.modalities.diffusion.requests import DenoisingRequest

ROOT = Path(__file__).parents[1]
WARM_UP = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", default=str(ROOT / "examples" / "digits" / "teacher"))
    parser.add_argument("--prompt-data", default=str(ROOT / "examples" / "digits" / "prompts.txt"))
    parser.add_argument("--device", default="cpu", help="of the in-process engine [cpu]")
    parser.add_argument("--batch", type=int, default=32, help="samples in one engine call [32]")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each variant [5]")
    parser.add_argument("--sglang-python")
    parser.add_argument("--sglang-url")
    parser.add_argument("--json", type=Path, default=Path("rollout.json"))
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        rows = measure(variants(chosen, stack), chosen)
    show(rows)
    chosen.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"written to {chosen.json}")
    return 0


def arguments(chosen: argparse.Namespace, *more: str):
    paths = ("--hf-checkpoint", chosen.hf_checkpoint, "--prompt-data", chosen.prompt_data, "--device", chosen.device)
    return parse_args([*paths, *more])


def variants(chosen: argparse.Namespace, stack: contextlib.ExitStack) -> dict:
    """name -> engine."""
    from miles_dmd.modalities.diffusion.conditions import PromptTable
    from miles_dmd.modalities.diffusion.encoding import ensure_table
    from miles_dmd.prompts import PromptSource
    from miles_dmd.training.compute import choose_compute, prepare_process

    prepare_process(1)
    url = chosen.sglang_url or stack.enter_context(server(chosen)).url
    texts = PromptSource(chosen.prompt_data, 0).texts

    def build(name, *more):
        args = arguments(chosen, "--rollout-engine", name, *more)
        compute = choose_compute(args.device, args.compute_dtype)
        table = PromptTable(ensure_table(args, texts, compute.device))
        make = registry.resolve(registry.load("engines", name).builds["diffusion"])
        engine = make(args, compute=compute, prompts=table, texts=texts, servers=())
        stack.callback(engine.close)
        return engine

    return {
        "in process": build("inprocess"),
        "in process, one at a time": build("inprocess", "--rollout-micro-batch-size", "1"),
        "server, stop": build("sglang", "--sglang-url", url),
        "server, capture": without_plugin(build("sglang", "--sglang-url", url)),
    }


@contextlib.contextmanager
def server(chosen: argparse.Namespace):
    from miles_dmd.engines.sglang.launch import serve

    args = arguments(chosen, "--rollout-engine", "sglang", "--sglang-python", chosen.sglang_python)
    started = serve(args, device=args.device, number=0, host="127.0.0.1")
    try:
        started.wait()
        yield started
    finally:
        started.close()


def without_plugin(engine):
    """As if the server had none."""
    for member in engine.fleet.members:
        member.capabilities = replace(member.capabilities, cannot_stop="capture is measured")
    return engine


def measure(engines: dict, chosen: argparse.Namespace) -> list[dict]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(chosen.rounds + WARM_UP):
        for name, engine in engines.items():
            steps = engine.args.num_inference_steps if hasattr(engine, "args") else len(engine.sigmas)
            requests = [DenoisingRequest(i, i % 2, 1000 * round_number + i, i % steps) for i in range(chosen.batch)]
            before = traffic(engine)
            started = time.perf_counter()
            engine.generate(requests)
            seconds[name].append(time.perf_counter() - started)
            moved = [now - then for now, then in zip(traffic(engine), before, strict=True)]
            engines[name].last = (moved, sum(request.stop_step + 1 for request in requests))
    rows = []
    for name, engine in engines.items():
        (sent, received, forwards), needed = engine.last
        median = statistics.median(seconds[name][WARM_UP:])
        rows.append(
            {
                "variant": name,
                "samples_per_second": chosen.batch / median,
                "forwards_per_sample": (forwards or needed) / chosen.batch,
                "bytes_per_sample": (sent + received) / chosen.batch,
            }
        )
    for row in rows:
        row["speed_ratio"] = row["samples_per_second"] / rows[0]["samples_per_second"]
    return rows


def traffic(engine) -> tuple[int, int, int]:
    """Bytes sent, bytes received, forwards so far."""
    if not hasattr(engine, "fleet"):
        return 0, 0, 0
    clients = [member.client for member in engine.fleet.members]
    return sum(c.sent_bytes for c in clients), sum(c.received_bytes for c in clients), engine.forwards


def show(rows: list[dict]) -> None:
    print(f"{'variant':<28}{'samples/s':>11}{'ratio':>8}{'forwards/sample':>17}{'bytes/sample':>14}")
    for row in rows:
        print(
            f"{row['variant']:<28}{row['samples_per_second']:>11.2f}{row['speed_ratio']:>8.3f}"
            f"{row['forwards_per_sample']:>17.2f}{row['bytes_per_sample']:>14,.0f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
