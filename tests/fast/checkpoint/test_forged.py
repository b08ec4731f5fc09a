"""Records that are sound each, with checksums that vouch for them, and that contradict each other: refused by file."""

import copy
import json

import pytest

from miles_dmd.checkpoint.manifest import LARGEST
from miles_dmd.errors import ConfigError, SaveError
from miles_dmd.preflight.resume import open_resume


@pytest.fixture
def run(resolved, saved):
    return resolved("--load", str(saved))


@pytest.fixture
def said(run, saved):
    """The line with which the checkpoint is refused; empty where it is taken."""

    def refusal():
        try:
            open_resume(run)
        except ConfigError as error:
            line = str(error)
        else:
            return ""
        assert "\n" not in line
        return line.removeprefix(f"--load {saved}: ")

    return refusal


def cursor(value):
    return lambda driver: driver["prompts"].update(cursor=value)


def draws(**values):
    return lambda driver: driver["observers"]["draws"].update(values)


def best(**values):
    return lambda driver: driver["observers"]["best"]["best"].update(values)


def of_role(change):
    """The same change of what trainer.json says of its one trained role."""
    return lambda trainer: change(*trainer["roles"].values())


FORGED = {
    "prompts before": ("driver.json", cursor(0), "prompts.cursor 0"),
    "prompts off by one": ("driver.json", cursor(25), "prompts.cursor 25"),
    "prompts a batch on": ("driver.json", cursor(28), "prompts.cursor 28"),
    "prompts far beyond": ("driver.json", cursor(10**30), "prompts.cursor 1000"),
    "another count of batches": ("driver.json", draws(batches=7), "prompts.cursor 24"),
    "another size of batches": ("driver.json", draws(size=3, batches=8), "draws.size 3"),
    "all prompts a batch on": (
        "driver.json", lambda d: (cursor(28)(d), draws(batches=7)(d)), "draws.batches 7"),
    "all prompts elsewhere": (
        "driver.json", lambda d: (cursor(25)(d), draws(since=1)(d)), "the samples that wait, which end elsewhere"),
    "skips that would use the bound up": (
        "driver.json", lambda d: d["observers"]["skips"].update(in_a_row=1), "skips.in_a_row"),
    "skips that were none": (
        "driver.json", lambda d: d["observers"]["skips"].update(total=1), "draws.batches 6"),
    "longer history of alarms": (
        "driver.json", lambda d: d["observers"]["alarms"]["series"].update({"critic/loss": [1.0] * 3}), "series of 3"),
    "alarm of no such name": (
        "driver.json", lambda d: d["observers"]["alarms"].update(ringing=["\x1b[31m"]), r"an alarm '\x1b[31m' ring"),
    "best student of a later step": ("driver.json", best(global_step=2), "best.best"),
    "best student by another metric": ("driver.json", best(metric="n"), "best.best"),
    "more steps of the optimizer": (
        "actor/trainer.json", of_role(lambda r: r["optimizer_steps"].update(w=2)), "optimizer_steps of at most 2"),
    "no steps of the optimizer": (
        "critic/trainer.json", of_role(lambda r: r["optimizer_steps"].clear()), "optimizer_steps of at most 0"),
    "all steps of another cycle": (
        "critic/trainer.json", of_role(lambda r: r.update(optimizer_steps={"w": 6}, scheduler_steps=6)),
        "scheduler_steps 6"),
    "learning rate of another step": (
        "critic/trainer.json", of_role(lambda r: r.update(scheduler_steps=3)), "scheduler_steps 3"),
    "average of another step": ("actor/trainer.json", of_role(lambda r: r.update(average_steps=0)), "average_steps 0"),
    "average without steps": ("actor/trainer.json", of_role(lambda r: r.update(average_steps=None)), "average.w"),
    "average that is not there": ("critic/trainer.json", of_role(lambda r: r.update(average_steps=4)), "average.w"),
    "moments of no parameter": (
        "critic/trainer.json", of_role(lambda r: r["optimizer_steps"].update(v=4)), "exp_avg.v"),
    "another parameter": ("actor/trainer.json", of_role(lambda r: r["parameters"].append("v")), "average.v"),
    "a parameter twice": (
        "actor/trainer.json", of_role(lambda r: r["parameters"].append("w")), "names a parameter twice"),
    "other ranks": ("actor/trainer.json", lambda t: t.update(ranks=2), "ranks 2"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "change", "part"), FORGED.values(), ids=FORGED)
def test_forged_record_is_refused(saved, forge, said, path, change, part):
    forge(saved, path, change)

    assert path in said()
    assert part in said()


def listed(content, path):
    return next(row for row in content["files"] if row["path"] == path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda c: c["files"].append(listed(c, "actor/shard-0.safetensors")), "'actor/shard-0.safetensors' twice"),
        (lambda c: c["groups"].update(actor=2), "lists no actor/rank_1.json"),
        (lambda c: c["groups"].update(actor=1, critic=3), "lists no critic/rank_1.json"),
    ],
)
def test_forged_manifest_is_refused(saved, rewrite, said, change, part):
    rewrite(saved, change)

    assert part in said()


def test_policy_version_of_another_student_is_refused_though_both_records_say_it(saved, rewrite, forge, said):
    forge(
        saved,
        "driver.json",
        lambda driver: (driver.update(policy_version=7), driver["pending"][0].update(policy_version=7)),
    )
    rewrite(saved, lambda content: content.update(policy_version=7))

    assert "policy version 7 does not go with 1 steps" in said()


@pytest.mark.parametrize("name", ["actor/shard-9.safetensors.json", "actor/rank_1.json", "notes/x", "more.json"])
def test_file_that_no_checkpoint_has_is_refused_though_it_is_listed(saved, rewrite, said, name):
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_text("{}")
    row = {"path": name, "size": 2, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}
    rewrite(saved, lambda content: content["files"].append(row))

    assert f"lists '{name}', which no checkpoint has" in said()


@pytest.mark.parametrize("path", ["manifest.json", "driver.json", "actor/args.json", "critic/trainer.json"])
def test_records_are_read_up_to_a_bound(saved, rewrite, said, path):
    with (saved / path).open("r+b") as file:
        file.truncate(LARGEST + 1)  # of which the disk holds nothing
    if path != "manifest.json":
        rewrite(saved, lambda content: listed(content, path).update(size=LARGEST + 1))

    assert path in said()


def test_no_checkpoint_is_written_that_could_not_be_read(make_run):
    """A hook of the user's remembers something that JSON writes, and that no record may hold."""
    for state in ({"text": "\ud800"}, {"text": "\0"}, {"number": 10**50}):
        run = make_run()
        run.observers["hook_0"] = type("Hook", (), {"state_dict": lambda self, state=state: state})()

        with pytest.raises(SaveError, match=r"driver\.json could not be read again: "):
            run.save()


def leaves(value, path=()):
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if rows is None:
        yield path, value
        return
    if isinstance(value, list) and value:
        yield path, value
    for key, item in list(rows):
        yield from leaves(item, (*path, key))


def like(value):
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 1000 + 1, *([value - 1] if value else [])]
    if isinstance(value, float):
        return [value * 2]
    if isinstance(value, list):
        return [value[:-1], [*value, value[-1]]]
    return [f"{value}x"] if isinstance(value, str) else []


SILENT = {
    # what a run has measured and drawn is in no other record
    "driver.json": {"observers.alarms.series", "observers.alarms.ringing", "observers.grids.of",
                    "observers.grids.reference", "observers.best.values", "observers.best.best.value",
                    "observers.best.way", "observers.best.metric"},
    "manifest.json": {"created", "parent", "versions"},
    "actor/trainer.json": set(),
    "critic/trainer.json": set(),
}  # fmt: skip


@pytest.mark.parametrize("path", SILENT)
def test_no_other_value_of_the_same_kind_is_taken_silently(saved, forge, rewrite, said, path):
    original = json.loads((saved / path).read_text())
    taken = set()
    for way, value in list(leaves(original)):
        if way[0] in ("plan", "sha256", "files"):  # compared as a whole, by tests of their own
            continue
        for other in like(value):
            changed = copy.deepcopy(original)
            place = changed
            for key in way[:-1]:
                place = place[key]
            place[way[-1]] = other

            def write(content, changed=changed):
                content.clear()
                content.update(changed)

            rewrite(saved, write) if path == "manifest.json" else forge(saved, path, write)
            if not said():
                taken.add(".".join(map(str, way)))

    assert {name for name in taken if not name.startswith(tuple(SILENT[path]) or ("-",))} == set()
