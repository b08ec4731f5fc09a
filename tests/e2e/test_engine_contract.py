"""Contract of rollout engines, held by all of them: the in-process sampler, and a real SGLang server."""

import pytest
import torch

from miles_dmd.errors import EngineError
from miles_dmd.modalities.diffusion.requests import DenoisingRequest

ENGINES = ["inprocess", pytest.param("sglang", marks=pytest.mark.long)]
pytestmark = pytest.mark.timeout(600)  # the first test waits for the server
SOLVERS = ["renoise", "euler"]
STEPS = 4
TOLERANCE = 1e-4


def requests(*stop_steps, seed=2**62):
    return [DenoisingRequest(7 + i, i % 10, seed + i, stop) for i, stop in enumerate(stop_steps)]


def assert_same(found, expected):
    torch.testing.assert_close(found.latents, expected.latents, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found.clean, expected.clean, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found.sigma, expected.sigma, rtol=0, atol=0)


@pytest.fixture(scope="module", params=ENGINES)
def flags_of_engine(request):
    if request.param == "inprocess":
        return "inprocess", ()
    return "sglang", ("--sglang-url", request.getfixturevalue("sglang_server").url)


@pytest.fixture
def engine(flags_of_engine, open_engine):
    """A fresh one, of version 0, whatever an earlier test has left."""
    name, more = flags_of_engine
    engine = open_engine(name, *more)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(open_engine):
    return open_engine("inprocess")


@pytest.fixture
def other_weights(reference):
    """(buckets, the in-process engine that holds them): the teacher, moved a little."""
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: value + 0.02 * value.std() * torch.randn(value.shape, generator=generator)
        for name, value in reference.model.network.named_parameters()
        if value.numel() > 1
    }
    moved = {name: moved.get(name, value).detach() for name, value in reference.model.network.named_parameters()}
    names = sorted(moved)
    return [{name: moved[name] for name in part} for part in (names[::2], names[1::2])]


@pytest.mark.parametrize("solver", SOLVERS)
def test_samples_at_every_stop_step_are_the_in_process_samplers(flags_of_engine, open_engine, solver):
    name, more = flags_of_engine
    engine, reference = open_engine(name, *more, "--solver", solver), open_engine("inprocess", "--solver", solver)
    asked = requests(*range(STEPS), *reversed(range(STEPS)))

    found = engine.generate(asked)

    assert_same(found, reference.generate(asked))


def test_batch_is_in_the_order_of_the_requests(engine):
    asked = requests(2, 0, 3, 1)

    batch = engine.generate(asked)

    assert batch.ids == (7, 8, 9, 10)
    assert batch.prompt_ids == (0, 1, 2, 3)
    assert batch.stop_steps == (2, 0, 3, 1)
    assert batch.sigma.tolist() == pytest.approx([0.75, 1.0, 0.5, 0.9])
    assert (batch.policy_version, batch.latents.dtype, batch.latents.shape) == (0, torch.float32, (4, 16, 8, 8))


def test_sample_depends_on_its_request_alone(engine):
    together = engine.generate(requests(3, 1, 3))

    alone = engine.generate(requests(3, 1, 3)[2:])

    torch.testing.assert_close(alone.clean[0], together.clean[2], rtol=0, atol=1e-5)


def test_finished_samples_are_clean_predictions_of_the_last_step(engine):
    finished = engine.sample(requests(0, 1))

    torch.testing.assert_close(finished, engine.generate(requests(3, 3)).clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop_step", [-1, STEPS])
def test_stop_step_outside_the_grid_is_refused(engine, stop_step):
    with pytest.raises(ValueError, match=r"stop steps \[-?\d\] lie outside \[0, 3\]"):
        engine.generate(requests(stop_step))


def test_weights_change_samples_as_in_process(engine, open_engine, other_weights):
    before = engine.generate(requests(1, 3))
    reference = open_engine("inprocess")
    reference.update_weights(other_weights, 1)

    engine.update_weights(other_weights, 1)

    after = engine.generate(requests(1, 3))
    assert after.policy_version == 1
    assert (after.clean - before.clean).abs().max() > 0.01
    assert_same(after, reference.generate(requests(1, 3)))


def test_weights_of_an_unknown_name_are_refused(engine, other_weights):
    (first, *_) = other_weights

    with pytest.raises(EngineError, match=r"weights of version 1 name \['no.such.weight'\], which the network"):
        engine.update_weights([{**first, "no.such.weight": torch.zeros(1)}], 1)


def test_weights_that_lack_a_parameter_are_refused(engine, other_weights):
    with pytest.raises(EngineError, match=r"weights of version 1 lack \["):
        engine.update_weights(other_weights[:1], 1)


def test_engine_samples_the_same_after_a_sleep_and_not_in_it(engine):
    before = engine.generate(requests(1))
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(requests(1))

    engine.wake()

    assert_same(engine.generate(requests(1)), before)


def test_healthy_engine_says_so(engine):
    assert list(engine.health().values()) == [""]
