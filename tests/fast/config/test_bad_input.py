"""Bad input of every kind: one line, exit code 2, and nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ODD = ("\x1b[31mred", "two\nlines", "\u202egnitirw", "\udcff")
"""What a terminal would obey, or cannot show."""


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--loss-tipe", "dmd2"], ["--loss-tipe dmd2", "did you mean --loss-type?"]),
        (["--critic-learning", "1"], ["--critic-learning 1", "--critic-"]),
        (["--learning-rate", "1"], ["--learning-rate 1", "did you mean --lr?"]),
        (["--student-lr", "1"], ["--student-lr 1", "did you mean --actor-lr?"]),
        (["--generator_lr", "1"], ["--generator_lr 1", "did you mean --actor-lr?"]),
        (["--fake-lr", "1"], ["--fake-lr 1", "did you mean --critic-lr?"]),
        (["--lr-critic", "1"], ["--lr-critic 1", "did you mean --critic-lr?"]),
        (["--fake-score-learning-rate", "1"], ["did you mean --critic-lr?"]),
        (["--fake-score-betas", "0"], ["did you mean --critic-betas?"]),
        (["--lora-rank", "8"], ["--lora-rank 8", "no adapters here"]),
        (["--report-to", "wandb"], ["--tensorboard, or --wandb-project"]),
        (["--log-interval", "5"], ["every cycle is a row of metrics.jsonl"]),
        (["--checkpoint", "x"], ["--hf-checkpoint to start", "--load to go on"]),
        (["--epochs", "3"], ["student steps, --num-rollout"]),
        (["--validation_prompt", "x"], ["the first prompts of --prompt-data"]),
        (["--fused-attention", "1"], ["--fused-attention 1: there is no such flag; --help"]),
        (["--num-frames", "1"], ["--num-frames 1: there is no such flag; --help"]),
        (["--hf-checkpoint", "stabilityai/sd3.5"], ["hf download stabilityai/sd3.5 --local-dir sd3.5, and name sd3.5"]),
        (["--hf-checkpoint", "https://huggingface.co/a/b"], ["hf download a/b --local-dir b, and name b"]),
        (["--critic-learning-rate", "1"], ["--critic-learning-rate 1", "did you mean --critic-lr?"]),
        (["--batch_size", "1"], ["--batch_size 1", "did you mean --rollout-batch-size?"]),
        (["--critic-loss-type", "dmd2"], ["--critic-loss-type dmd2", "the whole run", "pass --loss-type"]),
        (["--actor-seed=3"], ["--actor-seed 3", "the whole run", "pass --seed"]),
        (["--output-dir=x"], ["--output-dir x", "did you mean --save?"]),
        (["-lr", "1"], ["-lr 1", "did you mean --lr?"]),
        (["--rollout-batch", "8"], ["--rollout-batch 8", "did you mean --rollout-batch-size?"]),
        (["--" + "x" * 100_000], ["--xxx", "no such flag", "--help lists them"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--betas", "0.9"], ["--betas", "expected 2 arguments"]),
        (["--local", "yes"], ["'yes'", "--no-local"]),
        (["--local=yes"], ["--local", "yes", "it takes no value"]),
        (["--help=1"], ["--help", "1", "it takes no value"]),
        (["stray"], ["'stray'"]),
        (["--teacher-lr", "1e-5"], ["--teacher-lr 1e-5", "'dmd2' has no group 'teacher'", "critic, actor"]),
        (["--config", "digitz"], ["--config 'digitz'", "digits", "did you mean digits?"]),
        (["--config", ""], ["--config ''", "digits"]),
        (["--config", "x" * 300], ["--config xxx", "File name too long", "YAML file"]),
        (["--loss-type", "dmd3"], ["--loss-type 'dmd3'", "dmd2"]),
        (["--loss-type", ""], ["--loss-type ''", "dmd2"]),
        (["--loss-type", "no_lab.loss"], ["--loss-type no_lab.loss", "PYTHONPATH"]),
        (["--model-family", "sd9"], ["--model-family 'sd9'", "sd3"]),
        (["--model-family", ""], ["--model-family ''", "sd3"]),
        (["--critic-model-family", "sd9"], ["--critic-model-family sd9", "--model-family applies to the whole run"]),
        (["--num-rollout", "0"], ["--num-rollout 0", "at least 1"]),
        (["--num-rollout", "-3"], ["--num-rollout -3", "at least 1"]),
        (["--num-rollout", "1.5"], ["--num-rollout '1.5'", "whole number"]),
        (["--num-rollout", "true"], ["--num-rollout 'true'", "whole number"]),
        (["--num-rollout", "+3"], ["--num-rollout '+3'", "whole number"]),
        (["--lr", "+1e-5"], ["--lr '+1e-5'", "finite number"]),
        (["--save", "$SCRATCH/x"], ["--save '$SCRATCH/x'", "$SCRATCH is not replaced", "write the path out"]),
        (["--num-rollout", "1e3"], ["--num-rollout '1e3'", "write 1000"]),
        (["--num-rollout", "9" * 40], ["--num-rollout 9999", "at most 1,000,000,000"]),
        (["--num-rollout", "9" * 5000], ["--num-rollout '9999", "whole number"]),
        (["--rollout-batch-size", "1000000000"], ["--rollout-batch-size 1000000000", "[1, 1048576]"]),
        (["--cpu-threads", "9" * 40], ["--cpu-threads 9999", "[1, 4096]"]),
        (["--seed", "9" * 40], ["--seed 9999", "at most"]),
        (["--remote-timeout", "1e300"], ["--remote-timeout 1e+300", "at most"]),
        (["--fake-update-ratio", "0"], ["--fake-update-ratio", "0"]),
        (["--fake-update-ratio", "2.5"], ["--fake-update-ratio '2.5'"]),
        (["--lr", "-1e-5"], ["--lr -1e-05", "above 0"]),
        (["--lr", "inf"], ["--lr inf", "finite"]),
        (["--teacher-guidance", "nan"], ["--teacher-guidance nan", "finite"]),
        (["--teacher-guidance", "0"], ["--teacher-guidance 0"]),
        (["--dm-sigma-min", "0.5", "--dm-sigma-max", "0.4"], ["--dm-sigma-min 0.5", "--dm-sigma-max 0.4"]),
        (["--device", "tpu"], ["--device 'tpu'", "auto, cpu, cuda"]),
        (["--rollout-batch-size", "33", "--num-trainer-ranks", "2"], ["--rollout-batch-size 33", "nearest", "32"]),
        (["--hf-checkpoint", "/no/such"], ["--hf-checkpoint /no/such", "no directory"]),
        (["--hf-checkpoint", ""], ["--hf-checkpoint ''", "leave it out"]),
        (["--hf-checkpoint", "x" * 300], ["--hf-checkpoint xxx", "File name too long"]),
        (["--teacher-checkpoint", ""], ["--teacher-checkpoint ''", "leave it out"]),
        (["--prompt-data", "/no/such.txt"], ["--prompt-data /no/such.txt", "no such file"]),
        (["--prompt-data", "x" * 300 + ".txt"], ["--prompt-data xxx", "File name too long"]),
        (["--save", __file__], [f"--save {__file__}", "is no directory", "name a directory"]),
        (["--save", ""], ["--save ''", "leave it out"]),
        (["--save", "/dev/null"], ["--save /dev/null", "is no directory"]),
        (["--save", "x" * 300], ["--save xxx", "File name too long"]),
        (["--cache-dir", "/dev/null"], ["--cache-dir /dev/null", "is no directory"]),
        (["--cache-dir", "/dev/null/deep"], ["--cache-dir /dev/null/deep", "/dev/null is no directory"]),
        (["--cache-dir", ""], ["--cache-dir ''", "leave it out"]),
        (
            ["--cache-dir", "~nobody_of_that_name"],
            ["--cache-dir '~nobody_of_that_name'", "no home", "write the path out"],
        ),
        (["--load", "x" * 300], ["--load xxx", "File name too long"]),
        (["--ray-address", "here"], ["--ray-address here", "HOST:PORT"]),
        (["--ray-address", "127.0.0.1:99999"], ["--ray-address 127.0.0.1:99999", "HOST:PORT"]),
        (
            ["--rollout-engine", "sglang", "--sglang-url", "http://[::1"],
            ["--rollout-engine sglang", "Invalid IPv6 URL"],
        ),
        (["--negative-prompt", "a\udcff"], ["--negative-prompt 'a\\udcff'", "UTF-8"]),
        (["--critic-ema-decay", "0.9"], ["--critic-ema-decay 0.9", "applies to the whole run", "pass --ema-decay"]),
        (["--critic-ema-start-step", "3"], ["--critic-ema-start-step 3", "pass --ema-start-step"]),
        (["--actor-dm-shift", "2"], ["--actor-dm-shift 2"]),
        (["--critic-teacher-guidance", "2"], ["--critic-teacher-guidance 2", "applies to the whole run"]),
        (["--critic-alarm-critic-lag", "2"], ["--critic-alarm-critic-lag 2", "applies to the whole run"]),
        (["--num-rollout", "3", "--num-student-steps", "3"], ["--num-student-steps 3", "given already"]),
    ],
    ids=lambda value: " ".join(value)[:60] if value and value[0].startswith("-") else "",
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(run, flags, parts):
    code, lines, written = run(*flags)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lr", "1", "--lr", "2"], ["--lr 2", "give it once"]),
        (["--lr=1", "--lr=1"], ["--lr 1", "give it once"]),
        (["--betas", "0", "0.9", "--betas", "0", "0.8"], ["--betas 0 0.8", "give it once"]),
        (["--config", "digits", "--config", "sd35_medium_dmd2"], ["--config sd35_medium_dmd2", "give it once"]),
        (["--local", "--no-local"], ["--no-local", "--local is given already", "give one of the two"]),
        (["--critic-lr", "1", "--critic-lr", "2"], ["--critic-lr 2", "give it once"]),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(run, flags, parts):
    code, lines, written = run(*flags, whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
@pytest.mark.parametrize(
    "flag", ["--lr", "--solver", "--prompt-data", "--hf-checkpoint", "--config", "--loss-type", "--odd"]
)
def test_whatever_is_echoed_is_printable_on_one_line(run, flag, odd):
    code, lines, written = run(flag, odd)

    assert (code, len(lines), written) == (2, 1, [])
    assert flag in lines[0]


def test_a_directory_may_be_called_as_one_likes_and_is_shown_printably(asked, capsys):
    from miles_dmd.run import main

    assert main([*asked, "--save", "".join(ODD[:3])]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_a_loss_type_alone_is_told_what_it_needs(run):
    code, lines, written = run("--loss-type", "dmd2", whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in ("--hf-checkpoint", "--prompt-data", "--config digits"))


def test_who_named_a_preset_is_not_told_to_name_one(run):
    code, lines, _ = run("--config", "sd35_medium_dmd2", whole=False)

    assert (code, len(lines)) == (2, 1)
    assert "--hf-checkpoint and --prompt-data" in lines[0]
    assert "start from a preset" not in lines[0]


def test_a_directory_that_holds_another_run_is_left_alone(run, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")

    code, lines, written = run("--save", str(tmp_path / "old"))

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"--save {tmp_path / 'old'}", "--overwrite", "--load"))
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("flag", ["--save", "--cache-dir", "--prompt-data", "--hf-checkpoint", "--config"])
@pytest.mark.parametrize("target", ["loop.txt", "/dev/zero"])
def test_a_link_in_a_circle_or_to_a_device_is_refused_at_once(run, tmp_path, flag, target):
    (tmp_path / "loop.txt").symlink_to(target)

    code, lines, written = run(flag, str(tmp_path / "loop.txt"))

    assert (code, len(lines), written) == (2, 1, [])
    assert f"{flag} {tmp_path / 'loop.txt'}" in lines[0]


@pytest.mark.parametrize("flag", ["--save", "--cache-dir"])
@pytest.mark.parametrize("length", [300, 5000])
def test_a_path_that_is_too_long_is_said_once(run, flag, length):
    _, (line,), _ = run(flag, "x" * length)

    assert f"{flag} xxx" in line
    assert "xxx: File name too long; name a directory" in line
    assert line.count("x") < 1300 if length == 5000 else line.count("x" * 300) == 1


@pytest.mark.parametrize("flag", ["--save", "--cache-dir"])
def test_a_link_that_leads_nowhere_is_no_folder_to_write_to(run, tmp_path, flag):
    (tmp_path / "link").symlink_to("gone")

    code, lines, written = run(flag, str(tmp_path / "link"))

    assert (code, len(lines), written) == (2, 1, [])
    assert f"{flag} {tmp_path / 'link'}: {tmp_path / 'link'} is a link to gone" in lines[0]


@pytest.mark.parametrize("flag", ["--prompt-data", "--config"])
def test_a_pipe_is_not_waited_for(run, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe.txt")

    code, lines, written = run(flag, str(tmp_path / "pipe.txt"))

    assert (code, len(lines), written) == (2, 1, [])
    assert f"{flag} {tmp_path / 'pipe.txt'}: is a pipe" in lines[0]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("p.jsonl", '{"prompt": "\\ud800"}', ["line 1", "UTF-8"]),
        ("p.jsonl", '{"prompt": ' + "[" * 9999, ["line 1", "nested"]),
        ("p.jsonl", '{"prompt": ' + "9" * 5000 + "}", ["line 1", "5000 digits"]),
        ("p.jsonl", json.dumps({"prompt": ["x" * 10**6]}), ["line 1", "xxx...", "not a text"]),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', ["line 1", "'prompt' stands twice"]),
        ("p.txt", "a\rb\r\0\r", ["line 3", "NUL"]),
    ],
    ids=range(6),
)
def test_a_prompt_file_that_holds_no_prompts_is_refused_with_its_line(run, tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_text(content)

    code, lines, written = run("--prompt-data", str(path))

    assert (code, len(lines), written) == (2, 1, [])
    assert len(lines[0]) < 1000
    assert all(part in lines[0] for part in [f"--prompt-data {path}", *parts]), lines[0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: &a [x,x]\nargs: [*a, *a]", ["line 2", "aliases"]),
        ("args: {learning_rate: 1}", ["args.learning_rate", "did you mean lr?"]),
        ("args: {fake_lr: 1}", ["args.fake_lr", "trainers: [{role: critic, overrides: {lr: ...}}]"]),
        ("args: {student_learning_rate: 1}", ["trainers: [{role: actor, overrides: {lr: ...}}]"]),
        ("trainers: [{role: critic, overrides: {learning_rate: 1}}]", ["critic.learning_rate", "did you mean lr?"]),
        ("args: {lora_rank: 8}", ["args.lora_rank", "no adapters here"]),
        ("lr: 1.0e-5\nnum_rollout: 3", ["mine.yaml: 'lr' stands at the top; indent arguments under args:"]),
        ("learning_rate: 1.0e-5", ["'learning_rate' stands at the top (did you mean lr?); indent"]),
        ("", ["mine.yaml: the file asks for nothing", "args:"]),
        ("# lr: 1\n", ["mine.yaml: the file asks for nothing"]),
        ("{}", ["mine.yaml: the file asks for nothing"]),
        ("args:\n  <<: {lr: 1}\n", ["line 2", "merge keys (<<)", "write the names out"]),
        ("args:\n  <<: [{lr: 1}]\n", ["line 2", "merge keys (<<)"]),
        ("args: {num_rollout: +3}", ["line 1", "'+3'", "plain decimals"]),
        ("args: {lr: +3.5}", ["line 1", "'+3.5'", "plain decimals"]),
        ('args: {lr: "+3.5"}', ["args.lr '+3.5'", "finite number"]),
        ('args: {save: "${HOME}/x"}', ["args.save '${HOME}/x'", "${HOME} is not replaced"]),
        ("args: {cache_dir: ~nobody_of_that_name/x}", ["args.cache_dir", "no home of '~nobody_of_that_name'"]),
        ("args: {lr: !!int abc}", ["line 1", "'abc'"]),
        ("args: {lr: 2020-13-45}", ["line 1", "'2020-13-45'"]),
        ("args: {seed: " + "9" * 5000 + "}", ["line 1", "no int"]),
        ("args: " + "[" * 5000, ["line 1", "nested"]),
        ("args: {lr: 1, lr: 2}", ["line 1", "'lr' stands twice"]),
        ("algorithm: {trainer_type: [a]}", ["trainer_type ['a']", "distillation"]),
        ("algorithm: {trainer_type: {a: b}}", ["trainer_type {'a': 'b'}"]),
        ("distillation: {distribution_matching: {recipe: [a]}}", ["['a']"]),
        ("distillation: {distribution_matching: {profile: [a]}}", ["profile ['a']"]),
        ("actor_rollout_ref: {model: {path: [a]}}", ["hf_checkpoint ['a']"]),
        ('args: {negative_prompt: "\\0"}', ["args.negative_prompt '\\x00'", "NUL"]),
        ('args: {hf_checkpoint: "\\0"}', ["args.hf_checkpoint '\\x00'", "NUL"]),
        ('args: {loss_type: "\\0"}', ["--loss-type '\\x00'"]),
        ("args: {loss_type: [dmd2]}", ["loss_type ['dmd2'] must be text"]),
        ("args: {lr: {a: {b: c}}}", ["args.lr {'a': {'b': 'c'}}", "finite number"]),
        (f"args: {{? {'x' * 3000} : 1}}", ["args.xxx", "no argument"]),
        ("trainers: [{role: actor, overrides: {dm_shift: 2}}]", ["--actor-dm-shift 2", "only the critic does"]),
        (
            "trainers: [{role: critic, overrides: {normalizer_floor: 2}}]",
            ["--critic-normalizer-floor 2", "only the actor"],
        ),
        (
            "trainers: [{role: critic, overrides: {teacher_guidance: 2}}]",
            ["--critic-teacher-guidance 2", "one teacher"],
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_preset_that_makes_no_sense_is_refused(run, tmp_path, text, parts):
    path = tmp_path / "mine.yaml"
    path.write_text(text)

    code, lines, written = run("--config", str(path))

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in parts), lines[0]


def test_a_device_that_is_not_there_is_refused_without_torch(tmp_path, flags):
    words = [*flags("--device", "cuda", "--local"), "--save", str(tmp_path / "run")]
    code = "import sys; from miles_dmd.run import main; c = main(); assert 'torch' not in sys.modules; sys.exit(c)"

    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "--device cuda" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_console_that_cannot_show_a_path_is_shown_it_all_the_same(tmp_path, asked):
    done = subprocess.run(
        [sys.executable, ROOT / "train_diffusion.py", *asked, "--save", "\u00e9"], cwd=tmp_path, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout


def test_a_folder_that_is_gone_is_no_place_to_start_from(run, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    code, lines, written = run("--save", "here")

    assert (code, len(lines), written) == (2, 1, [])
    assert "the current directory: No such file or directory" in lines[0]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--loss-type", "dmd2"], 2, "--prompt-data"),
        (["--lr", "abc"], 2, "--lr 'abc'"),
        (["--help"], 0, "--fake-update-ratio"),
    ],
)
def test_the_program_itself_answers_so(tmp_path, argv, code, text):
    done = subprocess.run(
        [sys.executable, ROOT / "train_diffusion.py", *argv], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == code
    assert text in (done.stdout if code == 0 else done.stderr)
    assert len(done.stderr.splitlines()) == (0 if code == 0 else 1)
    assert os.listdir(tmp_path) == []
