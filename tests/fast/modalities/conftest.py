"""Small causal language models of several architectures, with random weights."""

import pytest
import torch

VOCABULARY = 23


@pytest.fixture
def build():
    """A tiny model of a type of transformers, in eval mode, from seed 0; weights large enough for peaked outputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(kind="llama", **more):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        heads = {} if kind == "gpt2" else {"num_key_value_heads": 2}
        config = AutoConfig.for_model(
            kind, vocab_size=VOCABULARY, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
            pad_token_id=None, **sizes, **heads, **more,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
        return model.eval()

    return build
