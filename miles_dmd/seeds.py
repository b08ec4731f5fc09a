"""Counter-based seeds, derived from a purpose and a sample id.

A seed depends on what it is for, never on how many were drawn before.

So the order of calls, the batch split, the number of ranks and a resume from a checkpoint change no random number.
"""

from hashlib import blake2b

_DIGEST_BYTES = 8


def derive(run_seed: int, purpose: str, *counters: int | str) -> int:
    """A seed in [0, 2**63) for ``purpose`` and ``counters`` (a cycle, a sample id, ...) within the run of ``run_seed``.

    63 bits, because ``torch.Generator.manual_seed`` and ``numpy`` both take them. Raises TypeError for a bool or a
    float (``True`` and ``1.0`` would silently stand for 1) and for any other type.

    >>> derive(0, "initial latents", 7) == derive(0, "initial latents", 7)
    True
    """
    if type(purpose) is not str:
        raise TypeError(f"purpose must be a str, got {purpose!r}")
    if type(run_seed) is not int:
        raise TypeError(f"run_seed must be an int, got {run_seed!r}")
    message = b"".join(_encoded(part) for part in (run_seed, purpose, *counters))
    return int.from_bytes(blake2b(message, digest_size=_DIGEST_BYTES, person=b"miles_dmd.seeds").digest(), "big") >> 1


def _encoded(part: int | str) -> bytes:
    """Type and length before the content, so that ("a", 1, 23) and ("a", 12, 3) are different messages."""
    if type(part) is int:
        kind, content = b"i", str(part).encode()
    elif type(part) is str:
        kind, content = b"s", part.encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"a seed's counters are int or str, got {part!r} ({type(part).__name__})")
    return kind + str(len(content)).encode() + b":" + content
