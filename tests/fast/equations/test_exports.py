"""The equations have one door, and behind it nothing of ours."""

import ast
import inspect
from pathlib import Path

import pytest

from miles_dmd import equations

FILES = sorted(Path(equations.__file__).parent.glob("*.py"))


def test_every_equation_is_exported_by_name():
    assert {
        "velocity_to_x0", "epsilon_to_x0", "v_prediction_to_x0", "dmd_gradient", "dmd_surrogate_loss",
        "fake_score_target", "fake_score_loss", "ode_regression_loss", "standard_cfg", "legacy_cfg", "ode_euler_step",
        "consistency_renoise_step", "timestep_shift", "truncated_shifted_sigma", "shift_sigma", "unshift_sigma",
        "bucket_logprobs", "resopd_loss", "token_loss",
    } <= set(equations.__all__)  # fmt: skip


@pytest.mark.parametrize("name", equations.__all__)
def test_every_equation_names_shapes_dtype_errors_and_source(name):
    told = inspect.getdoc(getattr(equations, name))

    assert "fp32" in told or "standard_cfg" in told
    assert "[" in told or "Shape of" in told
    assert "ValueError" in told or "errors as in" in told
    assert any(word in told for word in ("arXiv", "et al.", "DMD2", "CausVid"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_equations_know_torch_and_each_other_alone(path):
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name.name if isinstance(node, ast.Import) else node.module for node in imports for name in node.names}

    assert all(
        module.split(".")[0] in {"torch", "math", "typing", "collections"} or module.startswith("miles_dmd.equations")
        for module in modules
    )
