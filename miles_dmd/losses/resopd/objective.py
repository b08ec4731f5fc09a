"""Temporary objective."""

import torch
from miles_dmd.contracts.loss import LossOutput
from miles_dmd.modalities.language.scores import teacher_scores


def student_loss(models, batch, external, options):
    logits = models["student"].response_logits(batch)
    told = external["teacher"]
    mask = batch.mask
    ids = told["head_ids"].to(logits.device)[mask].long()
    q = told["head_logprobs"][mask]
    tq = told["tail_logprobs"][mask]
    logp = logits.float().log_softmax(-1)
    p = logp.gather(1, ids)
    tail = logp.scatter(1, ids, -torch.inf).logsumexp(-1)
    kl = (p.exp() * (p - q)).sum(-1) + tail.exp() * (tail - tq)
    zero = torch.zeros(())
    from miles_dmd.losses.resopd.observed import METRICS

    return LossOutput(kl.mean(), dict.fromkeys(METRICS, kl.mean().detach()), zero)


def score(models, batch, options):
    (model,) = models.values()
    return teacher_scores(model, batch, options.opd_top_k)
