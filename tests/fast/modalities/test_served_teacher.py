"""Teacher scores of a server: answers as SGLang 0.5.23 gave them, in both forms, and answers that must be refused.

Recorded of a random Llama with 309 tokens, prompt of 9, response of 5 whose fourth is 308, the last id there is.
"""

import base64
import copy
import json

import httpx
import pytest
import torch

from miles_dmd.client import Client
from miles_dmd.errors import EngineError, EngineMisanswer, EngineRefused, EngineUnavailable
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.served_teacher import FIELDS, ServedTeacher, connect, require_same_tokens
from miles_dmd.modalities.language.server import read_scores, score_request, tail_logprobs

PROMPT, RESPONSE = [197, 215, 20, 132, 248, 207, 155, 240, 244], [183, 298, 111, 308, 307]
TOKENS = PROMPT + RESPONSE
P, R, K = len(PROMPT), len(RESPONSE), 3
# transformers on the same weights, by log_softmax of the rows 8 .. 12
EXACT = [-5.934696674346924, -5.562417507171631, -5.75098991394043, -5.939165115356445, -5.544239044189453]
HEAD_IDS = [[154, 164, 231], [116, 41, 38], [34, 138, 253], [40, 28, 180], [38, 161, 138]]
HEAD = [
    [-5.243634223937988, -5.248788833618164, -5.257818222045898],
    [-5.104883670806885, -5.242268085479736, -5.242282390594482],
    [-5.18971061706543, -5.225509166717529, -5.263686656951904],
    [-5.193650245666504, -5.243021488189697, -5.255334377288818],
    [-5.035892486572266, -5.150024890899658, -5.187942028045654],
]
COMMON = {
    "finish_reason": {"type": "length", "length": 0},
    "prompt_tokens": 14,
    "weight_version": "default",
    "input_token_logprobs": [
        [None, 244, None], [EXACT[0], 183, None], [EXACT[1], 298, None], [EXACT[2], 111, None], [EXACT[3], 0, None],
        [EXACT[4], 307, None],
    ],
    "output_token_logprobs": [],
    "completion_tokens": 0,
    "weight_versions": [{"version": "default", "start": 0, "end": 0}],
}  # fmt: skip
NESTED = {
    **COMMON,
    "input_top_logprobs": [
        None,
        *(
            [[value, token, None] for value, token in zip(*row, strict=True)]
            for row in zip(HEAD, HEAD_IDS, strict=True)
        ),
    ],
}
SHAPE = {"input_top_logprobs_shape": [R, K], "input_top_logprobs_null_prefix": 1}
FLAT = {
    **COMMON, **SHAPE,
    "input_top_logprobs_val_flat": [value for row in HEAD for value in row],
    "input_top_logprobs_idx_flat": [token for row in HEAD_IDS for token in row],
}  # fmt: skip
BASE64 = {
    **COMMON, **SHAPE,
    "input_top_logprobs_val_flat_b64":
        "2sunwBT2p8AMQKjANVujwKnAp8DHwKfAHBKmwF83p8AfcKjAYjKmwNXGp8CzK6jACCahwAHNpMCfA6bA",
    "input_top_logprobs_idx_flat_b64":
        "mgAAAKQAAADnAAAAdAAAACkAAAAmAAAAIgAAAIoAAAD9AAAAKAAAABwAAAC0AAAAJgAAAKEAAACKAAAA",
    "input_top_logprobs_val_flat_b64_dtype": "float32", "input_top_logprobs_idx_flat_b64_dtype": "int32",
}  # fmt: skip
FORMS = {"nested": NESTED, "flat": FLAT, "base64": BASE64}


def scores_of(meta, tokens=TOKENS, prompt_length=P, top_k=K):
    return read_scores({"text": "", "output_ids": [], "meta_info": meta}, tokens, prompt_length, top_k, "http://h:1")


def changed(meta, **fields):
    return {**copy.deepcopy(meta), **fields}


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_answer_says_the_same(form):
    scores = scores_of(FORMS[form])

    assert scores.head_ids.tolist() == HEAD_IDS
    assert scores.head_ids.dtype == torch.int32
    assert torch.equal(scores.head_logprobs, torch.tensor(HEAD))
    assert torch.equal(scores.observed_logprobs, torch.tensor(EXACT))
    torch.testing.assert_close(scores.tail_logprobs, (1 - torch.tensor(HEAD).exp().sum(-1)).log())


def test_request_starts_in_front_of_the_response():
    body = score_request(TOKENS, P, K)

    assert body["logprob_start_len"] == 8
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert (body["input_ids"], body["top_logprobs_num"]) == (TOKENS, 3)


def test_last_id_of_the_vocabulary_is_scored_although_it_is_called_0():
    assert scores_of(BASE64).observed_logprobs[3] == torch.tensor(EXACT[3])


def test_scores_of_other_tokens_are_refused():
    with pytest.raises(EngineMisanswer, match=r"http://h:1: token 1 of the response is 299, and the answer scores 298"):
        scores_of(BASE64, [*PROMPT, 183, 299, 111, 308, 307])


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_begin_elsewhere_are_refused(form):
    with pytest.raises(EngineMisanswer, match="were asked for"):
        scores_of(FORMS[form], prompt_length=P - 1)


@pytest.mark.parametrize("form", FORMS)
def test_another_number_of_scores_is_refused(form):
    with pytest.raises(EngineMisanswer, match=r"4.* asked for"):
        scores_of(FORMS[form], top_k=4)


def test_a_first_row_with_a_score_is_refused():
    entries = copy.deepcopy(NESTED["input_token_logprobs"])
    entries[0][0] = -1.0

    with pytest.raises(EngineMisanswer, match="the first row of input_token_logprobs has a score"):
        scores_of(changed(NESTED, input_token_logprobs=entries))


@pytest.mark.parametrize("name", ["input_token_logprobs", "input_top_logprobs"])
def test_a_short_list_is_refused(name):
    with pytest.raises(EngineMisanswer, match=rf"{name} has 5 rows; 5 and one in front were asked for"):
        scores_of(changed(NESTED, **{name: NESTED[name][:-1]}))


def test_short_bytes_are_refused():
    data = base64.b64decode(BASE64["input_top_logprobs_val_flat_b64"])[:-4]

    with pytest.raises(EngineMisanswer, match="14 scores and 15 ids do not have the shape"):
        scores_of(changed(BASE64, input_top_logprobs_val_flat_b64=base64.b64encode(data).decode()))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_top_logprobs_val_flat_b64": "no!"}, "input_top_logprobs_val_flat cannot be decoded"),
        ({"input_top_logprobs_val_flat_b64_dtype": "bfloat16"}, r"val_flat is bfloat16, not torch.float32"),
        ({"input_top_logprobs_null_prefix": 0}, "behind 0 empty rows"),
        ({"input_token_logprobs": None}, "input_token_logprobs has nothing"),
        ({"prompt_tokens": 13}, "counts 13 prompt_tokens, and was sent 14"),
        (
            {"finish_reason": {"type": "abort", "message": "out of memory"}},
            "ended the request with abort out of memory",
        ),
        ({"finish_reason": None}, "no meta_info with a finish_reason"),
    ],
)
def test_a_broken_answer_is_refused(fields, said):
    with pytest.raises(EngineMisanswer, match=said):
        scores_of(changed(BASE64, **fields))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.1, None])
def test_numbers_that_are_no_log_probs_are_refused(value):
    entries = copy.deepcopy(NESTED["input_token_logprobs"])
    entries[3][0] = value

    with pytest.raises(EngineMisanswer, match=r"no log-probs, the first .* of token 2|entries that are no numbers"):
        scores_of(changed(NESTED, input_token_logprobs=entries))


@pytest.mark.parametrize("tail", [0.9, 0.5, 1e-3, 1e-6])
def test_tail_is_what_the_head_leaves(tail):
    head = torch.tensor([[0.75 * (1 - tail), 0.25 * (1 - tail)]], dtype=torch.float64).log()

    assert tail_logprobs(head).exp().item() == pytest.approx(tail, rel=1e-6)


def test_tail_is_finite_where_the_head_has_all():
    assert torch.isfinite(tail_logprobs(torch.tensor([[0.0, -40.0], [1e-5, -20.0]]))).all()


# -- requests ---------------------------------------------------------------------------------------------------------


class Server:
    """Answers as recorded, and counts; ``fails`` are answers that come first."""

    def __init__(self, *fails, version="default"):
        self.fails, self.version, self.asked = list(fails), version, []

    def __call__(self, request):
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"is_generation": True, "weight_version": "default"})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, 2]})
        body = json.loads(request.content)
        self.asked.append(body)
        if self.fails:
            return self.fails.pop(0)
        meta = changed(BASE64, weight_version=self.version)
        if len(body["input_ids"]) == P + 2:  # the second sample of ``batch``
            rows = {"input_top_logprobs": NESTED["input_top_logprobs"][:3]}
            meta = {
                **COMMON,
                **rows,
                "input_token_logprobs": COMMON["input_token_logprobs"][:3],
                "prompt_tokens": P + 2,
            }
        return httpx.Response(200, json={"output_ids": [], "meta_info": meta})


def teacher_of(*servers, deadline=0.0):
    transports = [httpx.MockTransport(server) for server in servers]
    clients = [
        Client(f"http://h:{number}", timeout=5.0, deadline=deadline, connections=2, transport=transport)
        for number, transport in enumerate(transports)
    ]
    return ServedTeacher(clients, top_k=K, concurrency=2)


def batch():
    """Two samples of 5 and 2 response tokens, padded."""
    short = [*PROMPT, *RESPONSE[:2], 0, 0, 0]
    return TokenBatch(
        ids=(70, 71), prompt_ids=(0, 0), prompt_lengths=(P, P), response_lengths=(5, 2),
        tokens=torch.tensor([TOKENS, short]), logprobs=torch.zeros(2, 5), policy_version=0, run_seed=0,
    )  # fmt: skip


def test_scores_are_padded_to_the_batch():
    found = teacher_of(Server()).score(batch())

    assert tuple(found) == FIELDS
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "head_ids": (2, 5, 3), "head_logprobs": (2, 5, 3), "observed_logprobs": (2, 5), "tail_logprobs": (2, 5)
    }  # fmt: skip
    assert found["head_ids"][1].tolist() == [*HEAD_IDS[:2], [0] * 3, [0] * 3, [0] * 3]
    assert all((value[1, 2:] == 0).all() for value in found.values())


def test_padding_is_not_sent():
    server = Server()

    teacher_of(server).score(batch())

    assert sorted(len(body["input_ids"]) for body in server.asked) == [P + 2, P + 5]


def test_samples_are_dealt_out_and_one_server_stands_in_for_another():
    down, up = Server(*[httpx.Response(503, text="busy")] * 2), Server()

    found = teacher_of(down, up).score(batch())

    assert (len(down.asked), len(up.asked)) == (1, 2)
    assert torch.isfinite(found["head_logprobs"]).all()


def test_a_sample_that_no_server_scores_is_named():
    with pytest.raises(
        EngineUnavailable, match=r"sample 70: no teacher server answers: http://h:0/generate: status 503"
    ):
        teacher_of(Server(*[httpx.Response(503, text="busy")] * 2)).score(batch())


def test_an_aborted_answer_is_not_replaced():
    aborted = httpx.Response(200, json={"meta_info": {"finish_reason": {"type": "abort", "message": "no memory"}}})
    first, second = Server(aborted, aborted), Server()

    with pytest.raises(EngineError, match=r"http://h:0, sample 70: the server ended the request with abort"):
        teacher_of(first, second).score(batch())
    assert all(len(body["input_ids"]) == P + 2 for body in second.asked)  # its own, and not that of the first


def test_a_refusal_names_the_sample():
    with pytest.raises(EngineRefused, match=r"sample 7[01]: http://h:0/generate: status 400: .*longer than"):
        teacher_of(Server(*[httpx.Response(400, text="input is longer than the context")] * 2)).score(batch())


def test_a_teacher_whose_weights_were_changed_is_refused():
    with pytest.raises(EngineMisanswer, match="scored with weights step 3, and they were default"):
        teacher_of(Server(version="step 3")).score(batch())


def test_a_server_of_another_kind_is_refused():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"architectures": ["CLIPModel"]}))
    client = Client("http://h:1", timeout=5.0, deadline=0.0, connections=1, transport=transport)

    with pytest.raises(EngineRefused, match="serves CLIPModel, which generates no text"):
        ServedTeacher([client], top_k=K, concurrency=1)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EngineUnavailable, match=r"http://127.0.0.1:9/model_info: ConnectError"):
        connect(["http://127.0.0.1:9"], top_k=K, deadline=0.0)


def test_another_tokenizer_is_refused():
    (client,) = teacher_of(Server()).clients

    require_same_tokens(client, ["a cat"], [[1, 2]])
    with pytest.raises(EngineRefused, match=r"other tokens of 'a dog' than the run"):
        require_same_tokens(client, ["a dog"], [[1, 3]])
