"""Ray for real: two nodes, what each must have, and failures that are told at once."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles_dmd.errors import ClusterError, ConfigError, MilesDmdError

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_run_joins_a_cluster_of_two_nodes_that_wants_a_token(make_args, tmp_path, monkeypatch):
    """Ranks of a group sit on different nodes: each node has one CPU, and the run wants two bundles."""
    import ray
    from ray.cluster_utils import Cluster

    from miles_dmd.cluster.supervision.authentication import TOKEN_FILE, own_authentication
    from miles_dmd.run import DistillationTrainer

    ray.shutdown()
    with own_authentication("token", tmp_path):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / TOKEN_FILE))
    try:
        more = ("--ray-address", cluster.address, "--num-trainer-ranks", "2", "--num-rollout", "1")
        args = make_args(*more, "--save", str(tmp_path / "run"))
        controller = DistillationTrainer(args).fit()
        servers = ("--sglang-python", sys.executable, "--num-sglang-servers", "2", "--save", str(tmp_path / "servers"))
        unreachable = make_args(*more, "--rollout-engine", "sglang", *servers)
        with pytest.raises(ConfigError, match=r"rollout server 1 would be on another node .* pass --sglang-host node"):
            DistillationTrainer(unreachable).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()

    assert controller.counters.optimizer_steps == {"fake_score": 4, "student": 1}


def test_address_without_a_cluster_is_refused_in_one_line(flags, tmp_path):
    """In a process of its own: this one may speak to a cluster already, which it would keep."""
    save = tmp_path / "run"
    command = [
        sys.executable,
        str(ROOT / "train_diffusion.py"),
        *flags("--ray-address", "127.0.0.1:1", "--save", str(save)),
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "--ray-address 127.0.0.1:1: no Ray cluster answers there" in done.stderr
    assert not save.exists()


class Rank:
    def hang(self):
        threading.Event().wait()  # until somebody ends the process

    def work(self, outcome):
        if outcome == "hang":
            self.hang()
        if outcome == "refuse":
            raise ConfigError("--lr 0 is too small")
        if outcome == "break":
            raise ZeroDivisionError("division by zero")
        if outcome == "die":
            import os

            os._exit(1)
        if isinstance(outcome, str) and outcome.startswith("warn"):
            logging.getLogger("miles_dmd.test").warning(outcome)
        if isinstance(outcome, str) and outcome.startswith("/"):
            for step in (1, 2):  # says how far it is, and goes on when that has been heard
                logging.getLogger("miles_dmd.test").info("step %s", step)
                while not Path(outcome, f"step {step}").exists():
                    time.sleep(0.05)
        if outcome == "warn and break":
            raise ZeroDivisionError("division by zero")
        return outcome


@pytest.fixture(scope="module")
def ranks(ray_cluster):
    import ray

    actors = [ray.remote(Rank).options(num_cpus=0, max_restarts=0).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        ("refuse", ConfigError, "--lr 0 is too small"),
        ("break", ClusterError, "critic rank 1 failed while training: ZeroDivisionError: division by zero"),
        ("die", ClusterError, r"the process of critic rank 1 \(pid \d+\) died while training"),
    ],
)
def test_failure_of_one_rank_is_told_while_another_hangs(ray_cluster, outcome, error, message):
    """For ever: a wait for that one would not end."""
    import ray

    from miles_dmd.cluster.supervision.waiting import gather

    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
    calls = {"critic rank 0": actors[0].work.remote("hang"), "critic rank 1": actors[1].work.remote(outcome)}

    with pytest.raises(error, match=message):
        gather(calls, "training")

    for actor in actors:
        ray.kill(actor)


def test_results_come_in_the_order_of_the_calls(ranks):
    from miles_dmd.cluster.supervision.waiting import gather

    assert gather({"a": ranks[0].work.remote(1), "b": ranks[1].work.remote(2)}, "counting") == [1, 2]


def test_late_rank_is_named(ranks):
    from miles_dmd.cluster.supervision.waiting import gather

    with pytest.raises(ClusterError, match="no answer from critic rank 0 within 0 s while scoring"):
        gather({"critic rank 0": ranks[0].work.remote("hang")}, "scoring", timeout=0.1)


@pytest.fixture
def supervised(ray_cluster):
    """``supervised(timeout, died=...)``: a supervisor, and two ranks that it watches."""
    import ray

    from miles_dmd.cluster.supervision.waiting import Supervisor
    from miles_dmd.cluster.supervision.watched import Watched, actor_class

    class WatchedRank(Rank, Watched):
        pass

    actors = [actor_class(WatchedRank).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.work.remote("here") for actor in actors])

    def supervise(*given, **more):
        supervisor = Supervisor(*given, **more)
        for rank, actor in enumerate(actors):
            supervisor.watch(f"critic rank {rank}", actor)
        return supervisor, actors

    yield supervise
    for actor in actors:
        ray.kill(actor)


def test_death_of_an_idle_rank_ends_the_wait_for_another(supervised):
    supervisor, (busy, idle) = supervised(60)
    call = busy.work.remote("hang")
    idle.work.remote("die")

    with pytest.raises(ClusterError, match=r"^the process of critic rank 1 \(pid \d+\) died while scoring$"):
        supervisor.gather({"critic rank 0": call}, "scoring")


def test_what_an_actor_warns_of_is_heard_once_while_others_work(supervised, caplog):
    supervisor, (busy, warning) = supervised(60)
    warning.work.remote("warn of something")
    warning.work.remote("warn again")

    supervisor.fetch(busy.work.remote(1), "critic rank 0", "scoring")
    with pytest.raises(ClusterError, match="ZeroDivisionError"):
        supervisor.fetch(warning.work.remote("warn and break"), "critic rank 1", "scoring")

    said = [record.message for record in caplog.records if record.name == "miles_dmd.test"]
    assert said == [f"critic rank 1: {text}" for text in ("warn of something", "warn again", "warn and break")]


def test_who_says_how_far_it_is_has_its_time_anew(supervised, caplog, monkeypatch, tmp_path):
    """Encoding thousands of prompts takes longer than any call should that says nothing."""
    from types import SimpleNamespace

    from miles_dmd.cluster.supervision import waiting

    now = [0.0]

    def hear(record):
        now[0] += 50.0
        (tmp_path / record.getMessage().removeprefix("critic rank 0: ")).touch()
        return True

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    caplog.set_level(logging.INFO, "miles_dmd")
    logger, counted = logging.getLogger("miles_dmd.test"), []
    logger.addFilter(hear)
    supervisor, (telling, _) = supervised(60)

    try:
        supervisor.gather({"critic rank 0": telling.work.remote(str(tmp_path))}, "encoding", counted.append)
    finally:
        logger.removeFilter(hear)

    assert now[0] == 100.0
    assert counted[-1] == 1


def test_rank_that_is_late_is_named_with_the_flag_and_where_it_hangs(supervised):
    import ray

    supervisor, (hanging, _) = supervised(1)
    call = hanging.work.remote("hang")
    while "self.hang()" not in ray.get(hanging.stacks.remote()):
        pass

    with pytest.raises(ClusterError) as raised:
        supervisor.fetch(call, "critic rank 0", "scoring")

    told = "no answer from critic rank 0 within 1 s while scoring; --remote-timeout 1 is the limit"
    assert str(raised.value) == told
    assert "self.hang()" in str(raised.value.__cause__)


def test_process_that_cannot_start_is_named_with_the_limit_and_rays_own_word(ray_cluster):
    """Ray tries again and again, and tells nobody who waits."""
    import ray

    from miles_dmd.cluster.supervision.session import raylet_stderr
    from miles_dmd.cluster.supervision.waiting import Supervisor
    from miles_dmd.cluster.supervision.watched import Watched, actor_class

    actors = [
        actor_class(Watched).options(num_cpus=0, runtime_env={"py_executable": python}).remote()
        for python in (sys.executable, "/no/such/python")
    ]
    supervisor = Supervisor(3600, start_timeout=20, raylet_stderr=raylet_stderr)
    for rank, actor in enumerate(actors):
        supervisor.watch(f"critic rank {rank}", actor)

    with pytest.raises(ClusterError) as raised:
        supervisor.await_start()

    for actor in actors:
        ray.kill(actor)
    told = "no answer from critic rank 1 within 20 s while starting; --placement-timeout 20 is the limit; Ray says: "
    assert str(raised.value).startswith(told)
    assert "/no/such/python: No such file or directory" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_processes_start_by_a_python_in_a_folder_that_a_shell_would_split(ray_cluster, tmp_path, monkeypatch):
    import ray

    from miles_dmd.cluster.placement import own_python, place
    from miles_dmd.cluster.supervision.watched import Watched, actor_class

    folder = tmp_path / "my (own) environment's"
    folder.symlink_to(sys.prefix)
    python = folder / "bin" / Path(sys.executable).name
    monkeypatch.setattr(sys, "executable", str(python))
    placement = place({"critic": 1}, device="cpu", cpu_threads=1, timeout=240, python=own_python())

    class Seen(Watched):
        def python(self):
            return sys.executable

    actor = actor_class(Seen).options(**placement.options(0)).remote()
    started_by = ray.get(actor.python.remote(), timeout=240)
    ray.kill(actor)
    placement.remove()

    assert started_by == str(python)


def test_node_whose_environment_names_another_machines_interface_is_named(ray_cluster, teacher, monkeypatch):
    import ray

    from miles_dmd.cluster import preflight

    there = ray.remote(preflight.report_node).options(
        num_cpus=0, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "eth7", "CUDA_VISIBLE_DEVICES": ""}}
    )
    monkeypatch.setattr(preflight, "_on", lambda node_id: there)

    with pytest.raises(ClusterError, match=r"node \S+ .*: GLOO_SOCKET_IFNAME=eth7: .*, and start its raylet again"):
        preflight.check_nodes([str(teacher / "model_index.json")])


def test_end_of_ray_is_told_while_ranks_work(supervised):
    supervisor, (busy, _) = supervised(60, died=lambda: "Ray's raylet on this machine died")

    with pytest.raises(ClusterError, match=r"^Ray's raylet on this machine died while scoring$"):
        supervisor.fetch(busy.work.remote("hang"), "critic rank 0", "scoring")


def test_nodes_report_what_they_have(ray_cluster, teacher):
    from miles_dmd.cluster.preflight import check_nodes

    (report,) = check_nodes([str(teacher / "model_index.json")])

    assert report.missing == ()
    assert report.free_gib > 0


def test_node_without_the_checkpoint_is_named(ray_cluster, tmp_path):
    from miles_dmd.cluster.preflight import check_nodes

    with pytest.raises(ClusterError, match=rf"node \S+ .* does not see {tmp_path}"):
        check_nodes([str(tmp_path / "model_index.json")])


def test_node_with_another_version_is_named(ray_cluster, teacher, monkeypatch):
    from miles_dmd import version
    from miles_dmd.cluster.preflight import check_nodes

    monkeypatch.setattr(version, "VERSION", "9.9")

    with pytest.raises(MilesDmdError, match=r"node \S+ .* has miles_dmd 0\.\S+, the driver 9\.9"):
        check_nodes([str(teacher / "model_index.json")])


def test_actor_whose_plug_in_exits_says_so_and_lives(ray_cluster):
    import ray

    from miles_dmd.cluster.supervision.waiting import Supervisor
    from miles_dmd.cluster.supervision.watched import Watched, actor_class

    class Exiting(Watched):
        def work(self, code):
            if code is not None:
                sys.exit(code)
            return "done"

    supervisor, actor = Supervisor(60.0), actor_class(Exiting).remote()
    supervisor.watch("actor rank 0", actor)

    with pytest.raises(ClusterError, match=r"^actor rank 0 failed while training: RuntimeError: called sys.exit\(7\)"):
        supervisor.fetch(actor.work.remote(7), "actor rank 0", "training")

    assert ray.get(actor.work.remote(None), timeout=60) == "done"
    ray.kill(actor)
