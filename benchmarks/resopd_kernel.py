"""ResOPD's kernel against the dense formula of the published form: time, peak memory, fp32 error, as ratios.

    python benchmarks/resopd_kernel.py                                    # V = 151,936 on the CPU, one thread
    python benchmarks/resopd_kernel.py --device cuda --rows 8192 --dtype bfloat16

All take the same logits to the gradient of their summed loss. Timed runs take turns, so that a busy moment of the
machine hits all alike. Memory is the peak of what torch allocates: beyond the logits (the gradient, in their dtype, is
part of that, except where it is written over them), and with them. Errors are those of the gradient in fp32 against the
same formula in fp64, of rows whose observed token is in the tail, by the student's tail mass.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from miles_dmd.equations.tokens import token_loss

SKIPPED = 1
"""First round, which warms up."""
TAIL_MASSES = (3e-1, 8e-3, 1e-4, 3e-6, 5e-8)
ERROR_VOCABULARY, ERROR_DRAWS = 32_000, 10
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Logits, head ids, head log-probs, observed ids, observed log-probs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="V [151936, of Qwen2.5 and 3]")
    parser.add_argument("--rows", type=int, default=512, help="tokens [512]")
    parser.add_argument("--top-k", type=int, default=4, help="of the teacher [4]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the logits [bfloat16]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU [1]")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each [5]")
    parser.add_argument("--json", type=Path, default=Path("resopd_kernel.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = cost(chosen)
    errors = [row for mass in TAIL_MASSES for row in error(mass)]
    show(rows, errors, chosen)
    chosen.json.write_text(json.dumps({"cost": rows, "error": errors}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {chosen.json}")
    return 0


def dense_resopd(
    logits: Tensor, head_ids: Tensor, head_logprobs: Tensor, observed_ids: Tensor, observed_logprobs: Tensor
) -> Tensor:
    """[N]: RB(A) - (1[A in S] - P)(mu_head - mu_bucket) on a dense log-softmax, with tails by 1 - mass."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
    head, observed = logp.gather(1, head_ids), logp.gather(1, observed_ids[:, None])[:, 0]
    with torch.no_grad():
        eps = torch.finfo(logp.dtype).eps
        p, ratio, gap = head.exp(), head - head_logprobs, observed - observed_logprobs
        mass = p.sum(1)
        tail = (1 - mass).clamp_min(eps)
        tail_ratio = tail.log() - (1 - head_logprobs.exp().sum(1)).clamp_min(eps).log()
        hit = (head_ids == observed_ids[:, None]).any(1)
        event = hit.to(mass.dtype) - mass
        value = torch.where(hit, (p * ratio).sum(1) / mass, gap)
    of_head = (p * ratio * head).sum(1) / mass
    of_bucket = -tail_ratio * (p * head).sum(1) / tail
    surrogate = torch.where(hit, of_head, gap * observed) - event * (of_head - of_bucket)
    return value + (surrogate - surrogate.detach())


def kernel(*inputs: Tensor) -> Tensor:
    return token_loss("resopd", *inputs)[0]


def kernel_over_logits(*inputs: Tensor) -> Tensor:
    return token_loss("resopd", *inputs, reuse_logits=True)[0]


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "dense": dense_resopd,
    "kernel": kernel,
    "kernel, over logits": kernel_over_logits,
}
COMPARED = {"dense": dense_resopd, "kernel": kernel}


def gradient(loss: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    logits = inputs[0].detach().requires_grad_()
    return torch.autograd.grad(loss(logits, *inputs[1:]).sum(), logits)[0]


def inputs_of(chosen: argparse.Namespace) -> Inputs:
    """Logits with every second observed token in the head; built in place, so that they are the peak until here."""
    generator = torch.Generator(chosen.device).manual_seed(0)
    logits = torch.empty(chosen.rows, chosen.vocabulary, dtype=getattr(torch, chosen.dtype), device=chosen.device)
    logits.normal_(0, 3, generator=generator)
    head_ids = torch.randint(chosen.vocabulary // chosen.top_k, (chosen.rows, chosen.top_k), device=chosen.device)
    head_ids += chosen.vocabulary // chosen.top_k * torch.arange(chosen.top_k, device=chosen.device)  # distinct
    logits.scatter_(1, head_ids, 12)
    head_logprobs = torch.full((chosen.rows, chosen.top_k), 0.8 / chosen.top_k, device=chosen.device).log()
    observed = torch.randint(chosen.vocabulary, (chosen.rows,), device=chosen.device)
    observed[::2] = head_ids[::2, 0]
    return logits, head_ids, head_logprobs, observed, torch.full_like(head_logprobs[:, 0], -5.0)


def cost(chosen: argparse.Namespace) -> list[dict]:
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(chosen.rounds + SKIPPED):
        for name, loss in VARIANTS.items():
            inputs = inputs_of(chosen)
            started = time.perf_counter()
            gradient(loss, inputs)[0, 0].item()  # waits for the device
            seconds[name].append(time.perf_counter() - started)
    rows = [
        {"variant": name, "seconds": statistics.median(seconds[name][SKIPPED:]), "bytes": peak_bytes(loss, chosen)}
        for name, loss in VARIANTS.items()
    ]
    logits = chosen.rows * chosen.vocabulary * getattr(torch, chosen.dtype).itemsize
    for row in rows:
        row["time_ratio"] = row["seconds"] / rows[0]["seconds"]
        row["memory_ratio"] = row["bytes"] / rows[0]["bytes"]
        row["memory_ratio_with_logits"] = (logits + row["bytes"]) / (logits + rows[0]["bytes"])
    return rows


def peak_bytes(loss: Callable[..., Tensor], chosen: argparse.Namespace) -> int:
    """Peak of what one gradient allocates; not of a process' memory, which lacks zeros that nobody has touched."""
    inputs = inputs_of(chosen)
    if chosen.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient(loss, inputs)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        gradient(loss, inputs)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def rows_of_tail_mass(mass: float, seed: int) -> Inputs:
    """One row in fp64 of which student and teacher have about this mass outside of four tokens; A is in the tail."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, ERROR_VOCABULARY, generator=generator, dtype=torch.float64)
    logits[:, :4] = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    logits[:, :4] += logits[:, 4:].logsumexp(1) - logits[:, :4].logsumexp(1) + torch.tensor((1 - mass) / mass).log()
    noise = 0.3 * torch.randn(1, ERROR_VOCABULARY, generator=generator, dtype=torch.float64)
    teacher = (logits + noise).log_softmax(1)
    observed = torch.randint(4, ERROR_VOCABULARY, (1,), generator=generator)
    # the student's logits are what fp32 holds: the error is that of the arithmetic and of the teacher's fp32 scores
    return logits.float().double(), torch.arange(4)[None], teacher[:, :4], observed, teacher[:, observed[0]]


def error(mass: float) -> list[dict]:
    found: dict[str, list[float]] = {name: [] for name in COMPARED}
    for seed in range(ERROR_DRAWS):
        exact = rows_of_tail_mass(mass, seed)
        single = tuple(value.float() if value.is_floating_point() else value for value in exact)
        for name, loss in COMPARED.items():
            expected = gradient(loss, exact)
            found[name].append(((gradient(loss, single) - expected).norm() / expected.norm()).item())
    return [
        {"tail_mass": mass, "variant": name, "median": statistics.median(values), "worst": max(values)}
        for name, values in found.items()
    ]


def show(rows: list[dict], errors: list[dict], chosen: argparse.Namespace) -> None:
    print(f"N = {chosen.rows}, V = {chosen.vocabulary:,}, k = {chosen.top_k}, {chosen.dtype} on {chosen.device}")
    print(f"{'variant':<20}{'seconds':>10}{'ratio':>8}{'MiB beyond logits':>20}{'ratio':>8}{'with logits':>13}")
    for row in rows:
        print(
            f"{row['variant']:<20}{row['seconds']:>10.3f}{row['time_ratio']:>8.3f}"
            f"{row['bytes'] / 2**20:>20.0f}{row['memory_ratio']:>8.3f}"
            f"{row['memory_ratio_with_logits']:>13.3f}"
        )
    print(f"\nfp32 error of the gradient, observed token in the tail, V = {ERROR_VOCABULARY:,}, {ERROR_DRAWS} draws")
    print(f"{'tail mass':<12}{'variant':<10}{'median':>10}{'worst':>10}")
    for row in errors:
        print(f"{row['tail_mass']:<12g}{row['variant']:<10}{row['median']:>10.0e}{row['worst']:>10.0e}")


if __name__ == "__main__":
    raise SystemExit(main())
