"""Two small language models of one byte-level tokenizer, and prompts: a teacher and a student with random weights."""

import json

import torch

SIZES = {"teacher": 32, "student": 16}


def tokenizer():
    """256 bytes and an end token, which AutoTokenizer opens without code of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(vocab={**vocabulary, "<|end|>": 256}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|end|>")


def write_models(directory, **more):
    """``teacher`` and ``student``, whose embeddings are tied, and prompts.jsonl."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for seed, (name, width) in enumerate(SIZES.items()):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=257, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=name == "student",
            bos_token_id=None, eos_token_id=256, pad_token_id=None, **more,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # peaked outputs, so that student and teacher differ
        model.save_pretrained(directory / name)
        tokenizer().save_pretrained(directory / name)
    lines = [{"text": f"line {number}: "} for number in range(13)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return directory
