"""Pictures show every sample unchanged and every number that a run has."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from miles_dmd.losses.dmd2.observed import PANELS
from miles_dmd.observe import pictures
from miles_dmd.observe.pictures import Panel, curves, fitted, sample_grid, shortened, smoothed, tick_labels

PHASES = ("time/rollout", "time/critic_train", "time/other")


def _rows(n):
    return [
        {"cycle": cycle, "critic/loss": 1 / cycle, **dict.fromkeys(PHASES, 0.5)}
        | ({"actor/loss": 2 / cycle, "actor/teacher_critic_gap": 0.5} if cycle > 1 else {})
        for cycle in range(1, n + 1)
    ]


def _images(n, height=8, width=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


def test_small_samples_are_enlarged_by_whole_pixels_and_not_changed(tmp_path):
    images = _images(4)

    sample_grid(images, tmp_path / "grid.png", columns=2)

    picture = np.asarray(Image.open(tmp_path / "grid.png").convert("RGB"))
    assert picture.shape == (2 * (128 + 8) + 8, 2 * (128 + 8) + 8, 3)
    for number, image in enumerate(images):
        top, left = 8 + 136 * (number // 2), 8 + 136 * (number % 2)
        assert np.array_equal(picture[top : top + 128, left : left + 128][::16, ::16], image)


def test_large_samples_are_shrunk_until_the_row_fits():
    wide = fitted(_images(1, 512, 1024)[0], 500)

    assert wide.shape == (250, 500, 3)
    assert fitted(_images(1, 300, 200)[0], 500).shape == (300, 200, 3)
    assert fitted(_images(1, 32, 32)[0], 90).shape == (64, 64, 3)


def test_labels_and_title_stand_in_the_picture(tmp_path, drawn):
    sample_grid(_images(3), tmp_path / "grid.png", ["a $1 or $2 coin", "a cat", "x" * 99], title="cycle 50")

    assert not any(text.get_parse_math() for text in drawn[0].texts)  # prices are no formula
    texts = [text.get_text() for text in drawn[0].texts]
    assert texts == ["a $1 or $2 coin", "a cat", "x" * 20 + "…", "cycle 50"]


def test_a_label_may_run_on_over_images_without_one(tmp_path, drawn):
    long = "a photograph of a red panda that is reading a newspaper in rain"

    sample_grid(_images(6), tmp_path / "grid.png", [long, "", "", long, "", "x"], columns=3)

    texts = [text.get_text() for text in drawn[0].texts]
    assert texts == [long, "a photograph of a red panda that is reading…", "x"]


@pytest.mark.parametrize(
    ("images", "labels", "fragment"),
    [
        (_images(0), (), "N > 0"),
        (_images(2)[0], (), "N, H, W, 3"),
        (_images(2).astype(np.float32), (), "uint8"),
        (_images(2)[..., :1], (), "N, H, W, 3"),
        (_images(2), ["one"], "2 images have 1 labels"),
    ],
)
def test_what_is_no_batch_of_images_is_refused(tmp_path, images, labels, fragment):
    with pytest.raises(ValueError, match=fragment):
        sample_grid(images, tmp_path / "grid.png", labels)

    assert not (tmp_path / "grid.png").exists()


def test_curves_have_a_panel_for_what_there_is_and_the_phases_stacked(tmp_path, drawn):
    curves(_rows(60), tmp_path / "curves.png", PANELS, "runs/digits-1")

    panels = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert panels == ["Losses", "Gap between teacher and critic", "Seconds per cycle by phase"]
    legends = [
        [text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn[0].axes if axes.get_legend()
    ]
    assert legends == [["actor", "critic"], ["other", "critic train", "rollout"]]
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 1000


def test_a_curve_holds_the_numbers_of_its_metric(tmp_path, drawn):
    rows = _rows(10)

    curves(rows, tmp_path / "curves.png", PANELS)

    actor, _, critic, _ = drawn[0].axes[0].lines
    assert list(actor.get_xdata()) == list(range(2, 11))
    assert list(critic.get_ydata()) == [row["critic/loss"] for row in rows]


@pytest.mark.parametrize("n", [1, 2, 200])
def test_runs_of_any_length_can_be_drawn_also_with_numbers_that_are_not_finite_or_negative(tmp_path, n):
    rows = _rows(n)
    rows[-1] |= {"critic/loss": math.nan, "actor/grad_norm": -1.0}

    curves(rows, tmp_path / "curves.png", PANELS)

    assert Image.open(io.BytesIO((tmp_path / "curves.png").read_bytes())).size[0] > 0


def test_curves_of_nothing_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="no committed cycle"):
        curves([], tmp_path / "curves.png", PANELS)


def test_every_phase_has_a_colour_of_its_own_and_what_is_left_over_comes_last_in_grey(tmp_path, drawn):
    rows = [{"cycle": cycle, "time/other": 0.1} | {f"time/p{n}": 1.0 for n in range(8)} for cycle in (1, 2)]

    curves(rows, tmp_path / "curves.png", PANELS)

    (axes,) = drawn[0].axes
    colours = [tuple(layer.get_facecolor()[0]) for layer in axes.collections]
    assert len(set(colours)) == 9
    assert axes.collections[-1].get_label() == "other"


def test_smoothing_is_the_mean_of_the_last_finite_values():
    assert smoothed([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert math.isnan(smoothed([math.inf], 3)[0])


@pytest.mark.parametrize(
    ("label", "length", "shown"),
    [("a cat", 10, "a cat"), ("a cat, in the rain", 9, "a cat, in"[:5] + "…"), ("x" * 9, 5, "xxxx…")],
)
def test_labels_are_cut_at_a_word(label, length, shown):
    assert shortened(label, length) == shown


@pytest.mark.parametrize("span", [1e-2, 1e-5, 1e-8, 1e3])
@pytest.mark.parametrize("start", [1.0, -0.5, 1e-6])
def test_no_two_ticks_have_the_same_label(tmp_path, drawn, start, span):
    rows = [{"cycle": n, "actor/loss": start + span * n / 20, "critic/loss": start} for n in range(20)]

    curves(rows, tmp_path / "curves.png", PANELS)

    for axis in (axis for axes in drawn[0].axes for axis in (axes.xaxis, axes.yaxis)):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        assert len(set(labels)) == len(labels), labels


def test_ticks_are_as_short_as_tells_them_apart():
    assert tick_labels([0.5, 1.0, 123.456]) == ["0.5", "1", "123.5"]
    assert tick_labels([1.0, 1.00001]) == ["1", "1.00001"]


def test_curves_of_one_group_are_told_apart_by_name(tmp_path, drawn):
    rows = [{"cycle": cycle, "opd/kl": 1.0, "opd/kl_coarse": 0.5} for cycle in (1, 2)]

    curves(rows, tmp_path / "curves.png", [Panel("Reverse KL", ("opd/kl", "opd/kl_coarse"))])

    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == ["kl", "kl coarse"]
