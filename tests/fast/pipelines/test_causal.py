"""Directories of language models: dropout, tokenizers of student and teacher."""

import json

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.causal import require_model, require_one_vocabulary

VOCAB = {"a": 0, "b": 1}


@pytest.fixture
def directory(tmp_path):
    """Writes config.json, and a tokenizer.json if there is a ``vocab``."""

    def write(name, *, vocab=None, added=(), **config):
        made = tmp_path / name
        made.mkdir()
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, **config}
        (made / "config.json").write_text(json.dumps(config))
        if vocab is not None:
            tokens = [{"content": token, "id": number} for token, number in added]
            content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": tokens}
            (made / "tokenizer.json").write_text(json.dumps(content))
        return made

    return write


@pytest.mark.parametrize("key", ["attention_dropout", "resid_pdrop"])
def test_a_model_with_dropout_is_refused(directory, key):
    require_model(directory("without", **{key: 0.0}), weights=False)

    with pytest.raises(ConfigError, match=rf"config\.json.*{key} 0\.1 must be 0.*set it there"):
        require_model(directory("with", **{key: 0.1}), weights=False)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"vocab": {"b": 0, "a": 1}}, "token 'b' has id 0 and id 1"),
        ({"vocab": {**VOCAB, "c": 2}}, "token 'c' has id 2 and no id"),
        ({"vocab": VOCAB, "added": [("<eos>", 2)]}, "token '<eos>' has id 2 and no id"),
    ],
)
def test_a_teacher_of_another_tokenizer_is_refused(directory, teacher, said):
    student = directory("student", vocab=VOCAB)

    with pytest.raises(ConfigError) as refused:
        require_one_vocabulary(directory("teacher", **teacher), "--hf-checkpoint", student)

    assert all(part in str(refused.value) for part in (said, f"--hf-checkpoint {student}", "student's tokenizer"))


def test_one_tokenizer_beside_another_padding_of_the_vocabulary_is_welcome(directory):
    student, teacher = directory("student", vocab=VOCAB), directory("teacher", vocab=VOCAB, vocab_size=64)

    require_one_vocabulary(teacher, "--hf-checkpoint", student)
