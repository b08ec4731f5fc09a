"""Preflight of servers that hold the teacher: they answer, and read the student's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd.client import Client
from miles_dmd.errors import ConfigError, EngineError
from miles_dmd.losses.resopd import Options
from miles_dmd.modalities.language.family import language_family
from miles_dmd.prompts import messages_of, read_prompts

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import Preflight

COMPARED = 8
"""Prompts whose tokens are compared."""
TIMEOUT = 10.0
"""Seconds for one answer."""


def preflight(args: Args) -> str:
    """A line on the servers of --opd-teacher-url; "" without any. Raises ConfigError for one that cannot be used."""
    options: Options = args.loss_options
    if not options.opd_teacher_url:
        return ""
    from miles_dmd.modalities.language.served_teacher import require_same_tokens

    unread = []
    tokenizer = language_family(args).code().open_tokenizer(args.pipeline_directory)
    texts = [text for text in read_prompts(args.prompt_data or "") if messages_of(text) is None][:COMPARED]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for url in options.opd_teacher_url:
        client = Client(url, timeout=TIMEOUT, deadline=0.0, connections=1)
        try:
            if client.get("/server_info").get("skip_tokenizer_init"):
                unread.append(url)
            else:
                require_same_tokens(client, texts, tokens)
        except EngineError as error:
            raise ConfigError(f"--opd-teacher-url {url}: {error}") from error
        finally:
            client.close()
    alike = [url for url in options.opd_teacher_url if url not in unread]
    lines = [f"Teacher: {', '.join(alike)} reads {len(texts)} prompts as the student does"] if alike else []
    if unread:
        lines.append(f"Teacher: {', '.join(unread)} runs with --skip-tokenizer-init, so its tokens were not compared")
    return "\n".join(lines)


if TYPE_CHECKING:  # mypy compares what the loss type names as text
    _preflight: Preflight = preflight
