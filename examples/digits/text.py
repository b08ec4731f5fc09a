"""Text of the teacher: three tiny tokenizers and three small, frozen, random text encoders.

Random is enough here: there are eleven prompts, and all that the transformer needs is that each has embeddings of its
own, always the same. Nothing about language is learned, so no twelfth prompt means anything to this teacher.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from digits import LENGTH, PROMPTS

CLIP_WIDTH, T5_WIDTH = 16, 48  # two CLIP widths side by side are padded to T5's


def clip_tokenizer(directory: Path, pad_token: str) -> Any:
    """A byte-level BPE in CLIP's own files (vocab.json, merges.txt) whose merges come from the prompts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.normalizer, bpe.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=900, end_of_word_suffix="</w>", show_progress=False, initial_alphabet=alphabet
    )
    bpe.train_from_iterator(PROMPTS, trainer)
    merges = [m if isinstance(m, str) else " ".join(m) for m in json.loads(bpe.to_str())["model"]["merges"]]
    # CLIP's order: bytes, bytes that end a word, merges, begin, end.
    pieces = [*alphabet, *(c + "</w>" for c in alphabet), *(m.replace(" ", "") for m in merges)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "<|startoftext|>", "<|endoftext|>"]))}
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "do_lower_case": True,
        "model_max_length": LENGTH,
        "pad_token": pad_token,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return CLIPTokenizer.from_pretrained(directory)


def t5_tokenizer(directory: Path) -> Any:
    """A sentencepiece unigram model (spiece.model) with one piece a word and T5's ids: pad 0, end 1, unknown 2.

    Trained pieces would be single letters (so few words give sentencepiece nothing to merge), and a prompt would not
    fit into 12 tokens: so the words are added as pieces of their own, which the unigram model prefers.
    """
    from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
    from transformers import T5Tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    trained = io.BytesIO()
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}
    SentencePieceTrainer.train(
        sentence_iterator=iter(PROMPTS * 20),
        model_writer=trained,
        vocab_size=64,
        hard_vocab_limit=False,
        minloglevel=2,
        **special,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(trained.getvalue())
    known = {piece.piece for piece in model.pieces}
    for word in dict.fromkeys(" ".join(PROMPTS).split()):
        if (piece := "\u2581" + word) not in known:
            model.pieces.add(piece=piece, score=-1.0)
    (directory / "spiece.model").write_bytes(model.SerializeToString())
    settings = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": 0,
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": LENGTH,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return T5Tokenizer.from_pretrained(directory)


def clip_encoder(tokenizer: Any, activation: str) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return scramble(CLIPTextModelWithProjection(config))


def t5_encoder(tokenizer: Any) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=2 * T5_WIDTH,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return scramble(T5EncoderModel(config))


@torch.no_grad()
def scramble(encoder: Any) -> Any:
    """Random weights large enough that a prompt's one different word shows in every output, the pooled one too.

    The usual initial scale (0.02) leaves the pooled embeddings of "zero" and "nine" almost equal, because they are read
    at the last token and reach it through attention alone.
    """
    for parameter in encoder.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
    return encoder.eval().requires_grad_(False)


def text_components(directory: Path) -> dict[str, Any]:
    """The six text components of a StableDiffusion3Pipeline; tokenizer files are written below directory."""
    first, second = (
        clip_tokenizer(directory / "tokenizer", "<|endoftext|>"),
        clip_tokenizer(directory / "tokenizer_2", "!"),
    )
    third = t5_tokenizer(directory / "tokenizer_3")
    return {
        "tokenizer": first,
        "text_encoder": clip_encoder(first, "quick_gelu"),
        "tokenizer_2": second,
        "text_encoder_2": clip_encoder(second, "gelu"),
        "tokenizer_3": third,
        "text_encoder_3": t5_encoder(third),
    }
