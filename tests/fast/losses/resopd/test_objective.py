"""The student's loss on a small causal language model, against the dense full-vocabulary KL."""

import math
from dataclasses import replace

import pytest
import torch
from token_batches import batch_of

from miles_dmd.errors import ScoresError
from miles_dmd.losses.resopd import TOLD, Options
from miles_dmd.losses.resopd.objective import score, student_loss
from miles_dmd.losses.resopd.observed import EVENT, EVENT_VARIANCE, METRICS, on_policy_z
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.observe.alarms import History

V = 32
PROMPT = [3, 1, 4]
PROMPTS, RESPONSES = [[3, 1, 4], [1], [5, 9], [2]], [[5, 3, 5], [8], [9, 7, 9, 3, 2], [6, 6]]


def language_model(seed, scale=12.0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    network = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        network.lm_head.weight.mul_(scale)  # peaked outputs, so that heads differ from row to row
    return LanguageModel(network, torch.float64)


@pytest.fixture
def pair():
    return {"student": language_model(0), "teacher_score": language_model(1)}


def told(models, batch, options):
    """What the teacher tells, with log-probs in fp32 as they travel."""
    found = score({"teacher_score": models["teacher_score"]}, batch, options)
    return {"teacher": {name: v.float() if v.is_floating_point() else v for name, v in found.items()}}


def gradient(model):
    found = torch.cat([parameter.grad.flatten() for parameter in model.network.parameters()])
    model.network.zero_grad()
    return found


def gradient_of(models, batch, options, external=None):
    output = student_loss(models, batch, told(models, batch, options) if external is None else external, options)
    output.loss.backward()
    return gradient(models["student"]), output


def next_token(models):
    """log p and log q [V] after PROMPT."""
    batch = batch_of([PROMPT], [[0]])
    return [models[name].response_logits(batch)[0].log_softmax(-1) for name in ("student", "teacher_score")]


def full_gradient(models, divergence):
    logp, logq = next_token(models)
    divergence(logp, logq.detach()).backward()
    return gradient(models["student"])


def reverse_kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum()


def expected_gradient(models, options, behaviour=None):
    """Mean over all next tokens, by the probability with which ``behaviour`` (the student, by default) samples them."""
    law = next_token(models)[0].detach() if behaviour is None else behaviour
    total = 0
    for token in range(V):
        batch = batch_of([PROMPT], [[token]], logprobs=law[token].float().reshape(1, 1))
        total = total + law[token].exp() * gradient_of(models, batch, options)[0]
    return total


@pytest.mark.parametrize("baseline", ["none", "bucket"])
@pytest.mark.parametrize("top_k", [1, 4, 16, V])
def test_the_expected_gradient_of_resopd_is_that_of_the_full_reverse_kl(pair, top_k, baseline):
    full = full_gradient(pair, reverse_kl)

    expected = expected_gradient(pair, Options(opd_top_k=top_k, opd_residual_baseline=baseline))

    assert (expected - full).norm() < 1e-5 * full.norm()


def test_the_expected_gradient_of_sampled_k2_is_that_of_the_full_reverse_kl(pair):
    full = full_gradient(pair, reverse_kl)

    expected = expected_gradient(pair, Options(opd_loss="sampled_k2"))

    assert (expected - full).norm() < 1e-5 * full.norm()


def test_forward_kl_over_a_head_of_the_whole_vocabulary_is_the_forward_kl(pair):
    full = full_gradient(pair, lambda logp, logq: (logq.exp() * (logq - logp)).sum())

    found, _ = gradient_of(pair, batch_of([PROMPT], [[7]]), Options(opd_loss="forward_kl_topk_tail", opd_top_k=V))

    assert (found - full).norm() < 1e-5 * full.norm()


@pytest.mark.parametrize("loss", ["resopd", "sampled_k2"])
def test_a_cap_that_cuts_nothing_undoes_sampling_from_another_policy(pair, loss):
    """An engine whose numbers differ: without the weight the estimate is biased, with it the mean is the gradient."""
    full, behaviour = full_gradient(pair, reverse_kl), next_token({**pair, "student": language_model(2)})[0].detach()
    options = Options(opd_loss=loss, opd_importance_cap=1e6)

    weighed = expected_gradient(pair, options, behaviour)
    plain = expected_gradient(pair, replace(options, opd_importance_cap=None), behaviour)

    assert (weighed - full).norm() < 1e-5 * full.norm()
    assert (plain - full).norm() > 1e-2 * full.norm()


def test_the_weight_is_capped_and_told(pair):
    batch = batch_of([PROMPT], [[7]], logprobs=next_token(pair)[0][7].float().detach().reshape(1, 1) - math.log(5))

    means = [gradient_of(pair, batch, Options(opd_importance_cap=cap))[1].metrics for cap in (2.0, 10.0, None)]

    assert [m["opd/importance_weight"].item() for m in means] == pytest.approx([2, 5, 1])
    assert means[0]["opd/rollout_drift"].item() == pytest.approx(math.log(5), rel=1e-5)


@pytest.mark.parametrize("loss", ["resopd", "forward_kl_topk_tail", "sampled_k2"])
@pytest.mark.parametrize("cuts", [[[0], [1], [2], [3]], [[0, 1, 2], [3]], [[2, 0, 3, 1]]])
def test_any_split_weighed_by_its_tokens_gives_the_gradient_of_the_whole(pair, loss, cuts):
    batch, options = batch_of(PROMPTS, RESPONSES), Options(opd_loss=loss)
    external = told(pair, batch, options)
    whole, output = gradient_of(pair, batch, options, external)

    found, means = 0, dict.fromkeys(output.metrics, 0.0)
    for rows in cuts:
        part = batch.take(rows)
        own = {"teacher": {name: value[rows] for name, value in external["teacher"].items()}}
        share, (slope, cut) = part.weight / batch.weight, gradient_of(pair, part, options, own)
        found = found + share * slope
        means = {name: means[name] + share * value.item() for name, value in cut.metrics.items()}

    assert (found - whole).norm() < 1e-5 * whole.norm()  # norms of the network are in fp32, whatever it is in
    assert means == pytest.approx({name: value.item() for name, value in output.metrics.items()}, rel=1e-4, abs=1e-6)


def test_what_stands_in_the_padding_changes_nothing(pair):
    batch, options = batch_of(PROMPTS, RESPONSES), Options()
    external = told(pair, batch, options)
    plain, _ = gradient_of(pair, batch, options, external)

    for name, value in external["teacher"].items():
        value[~batch.mask] = -9 if name == "head_ids" else torch.nan

    torch.testing.assert_close(gradient_of(pair, batch, options, external)[0], plain, rtol=0, atol=0)


@pytest.mark.parametrize("loss", ["resopd", "forward_kl_topk_tail", "sampled_k2"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(loss):
    models = {"student": language_model(0), "teacher_score": language_model(0)}

    slope, output = gradient_of(models, batch_of(PROMPTS, RESPONSES), Options(opd_loss=loss))

    assert abs(output.loss.item()) < 1e-5
    assert slope.abs().max().item() < 1e-5
    assert output.metrics["opd/overlap"].item() == 1
    assert output.metrics["opd/kl"].item() == pytest.approx(0, abs=1e-6)


def test_the_mean_of_the_estimate_is_the_reverse_kl(pair):
    logp, logq = (value.detach() for value in next_token(pair))

    kl = coarse = 0.0
    for token in range(V):
        metrics = gradient_of(pair, batch_of([PROMPT], [[token]]), Options())[1].metrics
        kl += logp[token].exp().item() * metrics["opd/kl"].item()
        coarse = metrics["opd/kl_coarse"].item()

    assert kl == pytest.approx(reverse_kl(logp, logq).item(), rel=1e-5)
    assert 0 < coarse < kl


def test_metrics_are_those_that_the_loss_type_declares(pair):
    _, output = gradient_of(pair, batch_of(PROMPTS, RESPONSES), Options())

    assert set(output.metrics) == {"loss", *METRICS}
    assert output.metrics["loss"].item() == pytest.approx(output.loss.item())
    assert output.nonfinite.item() == 0


def test_the_scorer_tells_what_the_loss_type_says(pair):
    assert set(told(pair, batch_of(PROMPTS, RESPONSES), Options())["teacher"]) == set(TOLD)


def test_an_actor_without_scores_does_not_train(pair):
    with pytest.raises(ScoresError, match="got no teacher scores of samples 0, 1, 2, 3"):
        student_loss(pair, batch_of(PROMPTS, RESPONSES), {}, Options())


def test_scores_of_another_head_are_refused(pair):
    batch = batch_of(PROMPTS, RESPONSES)

    with pytest.raises(ScoresError, match=r"head_ids has shape \[4, 5, 3\] and must have \[4, 5, 4\].*--opd-top-k"):
        student_loss(pair, batch, told(pair, batch, Options(opd_top_k=3)), Options())


def test_scores_shifted_by_one_are_refused(pair):
    batch, options = batch_of(PROMPTS, RESPONSES), Options()
    external = told(pair, batch, options)["teacher"]
    shifted = {name: value.roll(1, 1) if name.startswith("head") else value for name, value in external.items()}
    full = {"teacher": {name: value[2:3] for name, value in shifted.items()}}  # of the sample without padding

    with pytest.raises(ScoresError, match=r"sample 2, .*shifted by one"):
        student_loss(pair, batch.take([2]), full, options)


def test_a_broken_student_is_counted_and_not_hidden(pair):
    batch, options = batch_of(PROMPTS, RESPONSES), Options()
    external = told(pair, batch, options)
    with torch.no_grad():
        pair["student"].network.lm_head.weight[0] = torch.nan

    assert student_loss(pair, batch, external, options).nonfinite.item() == batch.weight


def z_of(models, temperature):
    """On-policy z of 4096 tokens that the student samples at a temperature, 16 after each of 256 prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (256, 2), generator=generator).tolist()
    with torch.no_grad():
        law = (models["student"].response_logits(batch_of(prompts, [[0]] * 256)) / temperature).softmax(-1)
        drawn = torch.multinomial(law, 16, replacement=True, generator=generator)
        batch = batch_of([p for p in prompts for _ in range(16)], [[token] for token in drawn.flatten().tolist()])
        metrics = student_loss(models, batch, told(models, batch, Options()), Options()).metrics
    history = History(())
    history.add({EVENT: metrics[EVENT].item(), EVENT_VARIANCE: metrics[EVENT_VARIANCE].item(), "actor/weight": 4096.0})
    return on_policy_z(history, 1)


def test_tokens_of_the_student_itself_are_on_policy():
    models = {"student": language_model(0), "teacher_score": language_model(0)}

    assert abs(z_of(models, 1.0)) < 4


def test_tokens_of_another_temperature_ring():
    models = {"student": language_model(0), "teacher_score": language_model(0)}

    assert z_of(models, 0.8) > 6
