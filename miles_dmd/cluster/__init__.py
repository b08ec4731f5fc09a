"""Trainer groups and the rollout worker as Ray actors. Ray is imported nowhere else."""

import os

# Read by Ray when it is imported, so it is set before any module here does. A local cluster listens on loopback only,
# so its token file would protect nothing.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Without it Ray replaces 127.0.0.1 by an address that others can reach, and listens on all; named after the two systems
# on which Ray does so by itself. It concerns clusters that are started here, not those that are joined.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Ray's default of 60 s is how long its agents and the driver would hang on to a cluster whose head is gone.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
# Ray's default of +15 would make trainers give way to everything else on the machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# A small chunk of a batch travels with the call that returns or takes it. From 100 KB on, Ray's default, it would go
# through the object store, which costs more than copying a megabyte.
os.environ.setdefault("RAY_max_direct_call_object_size", str(1 << 20))
# Ray calls an actor in a thread of its own, whose malloc arena glibc gives back and faults in at every step. It is
# read when a process starts, so it must be there before Ray is.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
