"""One Ray cluster for all tests of a session: its start costs ten seconds and more."""

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """Four logical CPUs, whatever this machine has: ranks take turns here anyway."""
    import ray

    from miles_dmd.cluster import session  # noqa: F401 - sets what Ray reads when it is imported

    ray.init(
        address="local", num_cpus=4, num_gpus=0, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=200 << 20, log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    yield
    ray.shutdown()
