"""dmd2's objectives; places ``student`` and ``fake``."""

import dataclasses

import torch.distributed as dist

from faulty.places import come_to, order
from miles_dmd.losses.dmd2.objective import follow_student, match_teacher
from miles_dmd.training import buckets

buckets.BUCKET_BYTES = 200_000  # so that the weights of a small network travel in several buckets too


def student(models, batch, external, options):
    come_to("student", f"actor-{dist.get_rank()}", dist.get_rank())
    output = match_teacher(models, batch, external, options)
    if order("nan", "student") in map(str, batch.ids):
        return dataclasses.replace(output, loss=output.loss * float("nan"))
    return output


def fake_score(models, batch, external, options):
    come_to("fake", f"critic-{dist.get_rank()}", dist.get_rank())
    return follow_student(models, batch, external, options)
