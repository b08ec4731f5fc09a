"""The plans and drivers that the tests of the control plane start from."""

import pytest

from miles_dmd.plan import (
    DistillationTrainerController,
    FakeBatchProvider,
    FakeDistillationHooks,
    FakePhaseExecutor,
    build_plan,
)

CAPABILITIES = {"distribution_matching", "autoregressive", "adversarial", "token_matching"}


@pytest.fixture
def make_plan():
    def make(recipe="dmd2", **settings):
        return build_plan(recipe, {"model_path": "/models/teacher", "fake_update_ratio": 2} | settings, CAPABILITIES)

    return make


@pytest.fixture
def make_controller(make_plan):
    def make(plan=None, executor=None, hooks=None, batches=1000, **options):
        return DistillationTrainerController(
            plan or make_plan(),
            FakeBatchProvider(num_batches=batches, batch_size=4),
            executor or FakePhaseExecutor(),
            hooks or FakeDistillationHooks(),
            **options,
        )

    return make
