"""LanguageModel: logits of response tokens, of a causal language model of any family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from miles_dmd.modalities.language.batch import TokenBatch


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers, sharded or not: only its root is ever called."""

    network: nn.Module
    compute_dtype: torch.dtype = torch.float32

    def response_logits(self, batch: TokenBatch) -> Tensor:
        """[N, V] in the network's dtype: one row for each of the N valid response tokens, sample by sample.

        Padding is on the right and attention is causal, so no valid row sees it, and there is no mask. Of the prompt no
        logits are made but those of its last token; the last response token predicts nothing, and is left out.
        """
        first = min(batch.prompt_lengths) - 1
        ends = [
            prompt + response for prompt, response in zip(batch.prompt_lengths, batch.response_lengths, strict=True)
        ]
        rows = max(ends) - 1 - first
        tokens = batch.tokens[:, : max(ends) - 1]
        logits = self.network(input_ids=tokens, use_cache=False, logits_to_keep=rows).logits.flatten(0, 1)
        valid = [
            sample * rows + row - first
            for sample, prompt in enumerate(batch.prompt_lengths)
            for row in range(prompt - 1, ends[sample] - 1)
        ]
        # all of them, as of a single sample: a copy of [N, V] would be gigabytes
        return logits if len(valid) == len(logits) else logits[torch.tensor(valid, device=logits.device)]
