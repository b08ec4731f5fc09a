"""Studio of language models: samples of student and teacher as texts, export as a transformers directory."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from miles_dmd.contracts.engine import RolloutEngine, RolloutRequest
from miles_dmd.contracts.reports import ExportReport
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.family import language_family
from miles_dmd.modalities.language.options import language_options
from miles_dmd.modalities.language.prompts import prompt_tokens
from miles_dmd.modalities.language.record import LanguageRecord
from miles_dmd.modalities.language.sampler import sampled_batch
from miles_dmd.network.pretrained import load_network
from miles_dmd.pipelines.causal import SETTINGS
from miles_dmd.pipelines.directory import VOCABULARIES
from miles_dmd.training.compute import Compute, release_cached_memory
from miles_dmd.training.export import exported_buckets, write_network, write_student

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

WEIGHTS_NAME = "model{suffix}.safetensors"
BESIDE = (*SETTINGS, *VOCABULARIES, "added_tokens.json", "chat_template.jinja")
"""Files that travel with the weights: settings and tokenizer."""
Texts = tuple[list[tuple[str, str]], Mapping[str, float]]
"""(prompt, response) of each sample, and numbers about them."""


class LanguageStudio:
    """``texts`` are the prompts, by prompt id."""

    def __init__(self, args: Args, compute: Compute, texts: Sequence[str]) -> None:
        self.args, self.compute, self.texts, self._family = args, compute, texts, language_family(args)

    def show(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], reference: None) -> Texts:
        """The student's responses, as ``engine`` samples them."""
        batch: Any = engine.generate(requests)
        return self._texts(batch)

    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Texts:
        """The teacher's responses to the same prompts. Its network is there only meanwhile."""
        directory, own, code = self.args.teacher_directory, language_options(self.args), self._family.code()
        network = load_network(self._family, directory, dtype=self.compute.dtype).requires_grad_(False)
        batch = sampled_batch(
            network.to(self.compute.device),
            prompt_tokens(code.open_tokenizer(directory), self.texts, own),
            requests,
            max_new_tokens=own.max_new_tokens,
            end_ids=code.end_tokens(directory),
            version=0,
            run_seed=self.args.seed,
            device=self.compute.device,
        )
        del network
        release_cached_memory()
        return self._texts(batch)

    def _texts(self, batch: TokenBatch) -> Texts:
        tokens, ends = batch.tokens.tolist(), self._ends
        whole = [p + r for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True)]
        said = [self._tokenizer.decode(row[p:e]) for row, p, e in zip(tokens, batch.prompt_lengths, whole, strict=True)]
        shown = [(self.texts[prompt], text) for prompt, text in zip(batch.prompt_ids, said, strict=True)]
        ended = sum(row[e - 1] in ends for row, e in zip(tokens, whole, strict=True))
        length = sum(batch.response_lengths) / len(batch)
        return shown, {"samples/length": length, "samples/ended": ended / len(batch)}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return self._family.code().open_tokenizer(self.args.pipeline_directory)

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self._family.code().end_tokens(self.args.pipeline_directory))

    def export(self, buckets: Iterable[Mapping[str, Tensor]], directory: Path, record: LanguageRecord) -> ExportReport:
        """Write the student as a directory that AutoModelForCausalLM and AutoTokenizer open. Raises SaveError."""
        start, dtype = self.args.pipeline_directory, self.args.export_dtype

        def write(partial: Path) -> ExportReport:
            report = write_network(partial, start, buckets, dtype, WEIGHTS_NAME)
            for path in sorted(start.iterdir()):
                if path.is_file() and (path.name in BESIDE or path.name.startswith("LICENSE")):
                    shutil.copyfile(path, partial / path.name)
            replace(record, weights=report).write(partial)
            return report

        return write_student(directory, write)

    def exported(self, directory: Path) -> Iterator[Mapping[str, Tensor]]:
        """Parameters of an exported student, bucket by bucket."""
        return exported_buckets(directory, self._family.saved_buffers)
