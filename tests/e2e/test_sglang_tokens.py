"""SGLang's real language-model server, as teacher and as rollout engine, against transformers on the same weights."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.engines.sglang import Options, delivery
from miles_dmd.engines.sglang.fleet_engine import clients_of
from miles_dmd.engines.sglang.language.sampler import TokenEngine
from miles_dmd.engines.sglang.launch import serve
from miles_dmd.errors import EngineError, EngineRefused
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.modalities.language.options import LanguageOptions
from miles_dmd.modalities.language.scores import teacher_scores
from miles_dmd.modalities.language.served_teacher import connect

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # servers that start on a busy machine

VOCABULARY, END = 257, 256
"""Bytes and an end token, which is the last id there is: the one that the server calls 0."""
PROMPTS = [list(b"The sea"), list(b"def main(argv):"), [65]]
NEW = 16
CLOSE = 3e-5
"""Largest difference of a log-prob in fp32; measured: 1e-5, where logits reach 30."""


def model_of(directory, kind):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=END, bos_token_id=None,
        tie_word_embeddings=kind == "qwen2", initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, value in model.named_parameters():
        if name.endswith("bias"):  # which begin as zeros, so that nobody would miss them
            torch.nn.init.normal_(value, std=0.2)
    model.save_pretrained(directory)
    return model.eval()


class Served:
    """A model in this process, its directory, and a server of it."""

    def __init__(self, tmp_path_factory, sglang_python, kind):
        self.directory = tmp_path_factory.mktemp(kind)
        self.model = model_of(self.directory, kind)
        self.cache = tmp_path_factory.mktemp("cache")
        self.server = serve(self.args(sglang_python=sglang_python), device="cpu", number=0, host="127.0.0.1")

    def args(self, **options):
        return SimpleNamespace(
            engine_options=Options(**{"sglang_concurrency": 4, "sglang_deadline": 0.0, **options}),
            modality_options=LanguageOptions(max_prompt_tokens=32, max_new_tokens=64), loss_type="resopd",
            compute_dtype="fp32", seed=0, cpu_threads=1, cache_dir=self.cache, pipeline_directory=self.directory,
        )  # fmt: skip

    def engine(self, **options):
        args = self.args(**{"sglang_url": (self.server.url,), "verify_weights": "every", **options})
        return TokenEngine(
            args, clients_of(args.engine_options, ()), PROMPTS, directory=self.directory, end_ids=(END,),
            max_new_tokens=NEW,
        )  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory, sglang_python):
    served = Served(tmp_path_factory, sglang_python, "llama")
    served.server.wait()
    yield served
    served.server.close()


@pytest.fixture
def open_(llama):
    """``open_(how)``: an engine over that server."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(llama.engine(**options)))


@pytest.fixture
def engine(open_):
    return open_()


def requests(*seeds):
    return [RolloutRequest(100 + i, i % len(PROMPTS), seed) for i, seed in enumerate(seeds)]


@torch.no_grad()
def rows_of(model, batch):
    """[B, R, V] fp64 log-probs of each response position, and the mask."""
    found = torch.zeros(*batch.logprobs.shape, VOCABULARY, dtype=torch.float64)
    for row, (prompt, response) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        logits = model(batch.tokens[row : row + 1, : prompt + response]).logits[0, prompt - 1 : -1]
        found[row, :response] = logits.double().log_softmax(-1)
    return found


def require_logprobs_of(model, batch):
    exact = rows_of(model, batch).gather(-1, batch.observed[..., None])[..., 0].float()
    torch.testing.assert_close(batch.logprobs, exact.where(batch.mask, 0.0), atol=CLOSE, rtol=0)


def changed(model, factor):
    """A copy of the model's parameters, in two buckets, and the model holding them."""
    for value in model.parameters():
        value.data.mul_(factor)
    items = [(name, value.detach().clone()) for name, value in model.named_parameters()]
    return [dict(items[:4]), dict(items[4:])]


def token_batch(responses):
    """Responses as if somebody had sampled them."""
    rows = [torch.tensor([*PROMPTS[i], *response]) for i, response in enumerate(responses)]
    lengths = tuple(map(len, responses))
    return TokenBatch(
        ids=tuple(range(40, 40 + len(rows))), prompt_ids=tuple(range(len(rows))),
        prompt_lengths=tuple(len(PROMPTS[i]) for i in range(len(rows))), response_lengths=lengths,
        tokens=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        logprobs=torch.zeros(len(rows), max(lengths)), policy_version=0, run_seed=0,
    )  # fmt: skip


# -- teacher ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY])
def test_scores_are_those_of_the_teacher_in_process(llama, top_k):
    batch = token_batch([[*b" was calm", END], [10, END, 0, 255], [END]])
    teacher = connect([llama.server.url], top_k=top_k)

    found = teacher.score(batch)

    exact, mask = teacher_scores(LanguageModel(llama.model), batch, top_k), batch.mask
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in exact.items()
    }
    for name in ("head_logprobs", "observed_logprobs"):
        torch.testing.assert_close(found[name], exact[name], atol=CLOSE, rtol=0)
    # ids by what they score: ties may be told in another order
    said = rows_of(llama.model, batch).gather(-1, found["head_ids"].long()).float()
    torch.testing.assert_close(found["head_logprobs"][mask], said[mask], atol=CLOSE, rtol=0)
    if top_k < VOCABULARY:
        torch.testing.assert_close(found["tail_logprobs"], exact["tail_logprobs"], atol=1e-4, rtol=0)
    assert all((value[~mask] == 0).all() for value in found.values())
    teacher.close()


def test_a_sample_that_is_too_long_is_named(llama):
    teacher = connect([llama.server.url], top_k=4)

    with pytest.raises(EngineRefused, match=r"sample 40: .*longer than the model's context length \(256 tokens\)"):
        teacher.score(token_batch([[65] * 300]))
    teacher.close()


# -- samples ----------------------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_the_same_weights_in_process(engine, llama):
    batch = engine.generate(requests(*range(12)))

    require_logprobs_of(llama.model, batch)
    assert batch.policy_version == 0
    assert max(batch.response_lengths) <= NEW


def test_a_sample_is_its_seeds_alone(engine):
    asked = requests(*range(9))

    together, alone = engine.generate(asked), [engine.generate([request]) for request in asked[:3]]

    assert "repeats a sample by its seed" in engine.notes[0]
    for row, one in enumerate(alone):
        length = one.response_lengths[0]
        assert torch.equal(one.observed[0], together.observed[row, :length])
    assert len({tuple(row) for row in engine.generate(requests(0, 1, 2, 3)).tokens.tolist()}) == 4


def test_tokens_come_from_the_whole_distribution(engine, llama):
    """The alarm of on-policy distillation: how often the sampled token is one of the four likeliest."""
    batch = engine.generate([RolloutRequest(i, 0, 10**12 + i) for i in range(64)])

    exact, mask = rows_of(llama.model, batch), batch.mask
    top = exact.topk(4)
    mass = top.values.exp().sum(-1)[mask]
    hit = (top.indices == batch.observed[..., None]).any(-1)[mask].double()
    z = (hit - mass).sum() / (mass * (1 - mass)).sum().sqrt()
    assert mask.sum() > 500
    assert abs(float(z)) < 4


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_weights_travel_either_way_and_change_what_is_sampled(llama, open_, how):
    engine = open_(sglang_weights=how)
    before = engine.generate(requests(1, 2, 3))
    student = model_of(llama.cache / "student", "llama")

    engine.update_weights(changed(student, 1.1), 1)

    after = engine.generate(requests(1, 2, 3))
    require_logprobs_of(student, after)
    assert after.policy_version == 1
    assert not torch.equal(after.logprobs, before.logprobs)


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_weights_that_change_on_the_way_are_noticed(llama, open_, monkeypatch, how):
    transport = {"tensor": delivery.InRequests, "disk": delivery.ThroughFolder}[how]
    send = transport.send
    engine = open_(sglang_weights=how)
    monkeypatch.setattr(transport, "send", lambda self, part: send(self, {k: v * 1.001 for k, v in part.items()}))

    with pytest.raises(EngineError, match="does not hold the weights that it was sent: it holds another"):
        engine.update_weights(changed(model_of(llama.cache / "student", "llama"), 1.0), 1)
    with pytest.raises(EngineError, match="the last weight update failed"):
        engine.generate(requests(1))


def test_a_run_begins_with_its_checkpoint_whatever_the_server_held(llama, open_):
    first = open_()
    first.update_weights(changed(model_of(llama.cache / "student", "llama"), 1.2), 1)

    second = open_()

    require_logprobs_of(llama.model, second.generate(requests(1, 2, 3)))
    with pytest.raises(EngineError, match=r"sampled with weights .*, and the run's are"):
        first.generate(requests(1))


def test_a_teacher_that_somebody_updates_is_refused(llama, open_):
    teacher = connect([llama.server.url], top_k=4)
    open_()  # which gives its weights a name

    with pytest.raises(EngineError, match="a teacher is frozen"):
        teacher.score(token_batch([[65]]))
    teacher.close()


def test_biases_and_a_tied_head_arrive(tmp_path_factory, sglang_python):
    served = Served(tmp_path_factory, sglang_python, "qwen2")
    try:
        served.server.wait()
        engine = served.engine()
        require_logprobs_of(served.model, engine.generate(requests(1, 2, 3)))

        engine.update_weights(changed(served.model, 1.1), 1)

        require_logprobs_of(served.model, engine.generate(requests(1, 2, 3)))
        engine.close()
    finally:
        served.server.close()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_server_sleeps_and_samples_the_same_afterwards(engine):
    before = engine.generate(requests(1, 2))

    engine.sleep()
    engine.wake()

    assert torch.equal(engine.generate(requests(1, 2)).tokens, before.tokens)
    assert list(engine.health().values()) == [""]
