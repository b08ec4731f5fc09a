"""What every actor of a run can be asked while it works: whether it lives, and where it is.

Both are answered by threads of their own. So the actor's work runs in a thread too, always the same one: Ray keeps the
main thread for actors without such groups.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

import ray

GROUP = "watch"


class Watched:
    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def until_death(self) -> None:
        """Never returns: who waits for it hears of the end of this process."""
        threading.Event().wait()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """Where each of this process's Python threads is."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"  thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
            for number, frame in sys._current_frames().items()
            if number != threading.get_ident()
        )


def actor_class(kind: type[Watched]) -> Any:
    """``kind`` as Ray starts it."""
    return ray.remote(concurrency_groups={GROUP: 2})(kind)
