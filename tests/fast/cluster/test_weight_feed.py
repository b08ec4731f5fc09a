"""Weights reach the engine bucket by bucket, and what is wrong with them reaches whoever brings them."""

import threading

import pytest
import torch

from miles_dmd.cluster.rollout_actor import RolloutActor
from miles_dmd.cluster.weight_feed import WeightFeed
from miles_dmd.errors import EngineError
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.encoding import ensure_table
from miles_dmd.prompts import read_prompts
from miles_dmd.rollout import RolloutWorker
from miles_dmd.training.compute import choose_compute


def test_items_come_in_order_and_at_most_two_wait():
    used, may_go_on = [], threading.Semaphore(0)

    def use(items):
        for item in items:
            may_go_on.acquire()
            used.append(item)

    feed = WeightFeed(use)
    feed.put("in use")
    feed.put("waits")
    third = threading.Thread(target=feed.put, args=("third",))
    third.start()
    third.join(0.5)
    waits = third.is_alive()
    for _ in range(3):
        may_go_on.release()
    third.join()
    feed.finish()

    assert waits
    assert used == ["in use", "waits", "third"]


def test_failure_is_told_to_whoever_brings_the_next():
    def use(items):
        next(items)
        raise EngineError("it does not fit")

    feed = WeightFeed(use)

    with pytest.raises(EngineError, match="it does not fit"):
        put_all(feed, range(4))


def put_all(feed, items):
    for item in items:
        feed.put(item)


@pytest.fixture(scope="module")
def actor(make_args, digit_prompts):
    args, compute = make_args(), choose_compute("cpu", "fp32")
    table = PromptTable(ensure_table(args, read_prompts(digit_prompts), compute.device))
    actor = RolloutActor()
    actor.worker = RolloutWorker(args, compute=compute, prompts=table)
    return actor


def parameters(actor):
    return dict(actor.worker.engine.model.network.named_parameters())


def update(actor, tensors, version):
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        actor.feed("update_weights", {name: tensor}, number == len(tensors), version)


def test_engine_takes_one_parameter_after_another(actor):
    larger = {name: 1.5 * value.detach() for name, value in parameters(actor).items()}

    update(actor, larger, 1)

    assert actor.worker.engine.version == 1
    assert all(torch.equal(value, larger[name]) for name, value in parameters(actor).items())


def test_refused_update_ends_and_the_next_one_is_taken(actor):
    tensors = {name: value.detach().clone() for name, value in parameters(actor).items()}

    with pytest.raises(EngineError, match=r"weights of version 2 name \['no.such.weight'\]"):
        update(actor, {"no.such.weight": tensors["proj_out.bias"], **tensors}, 2)

    update(actor, tensors, 3)
    assert actor.worker.engine.version == 3
