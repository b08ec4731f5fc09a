"""Alarms and curves of the numbers that grids of samples give."""

from miles_dmd.observe.alarms import Alarm, latest
from miles_dmd.observe.pictures import Panel

METRICS = ("samples/diversity", "samples/saturation")
ALARMS = (
    Alarm(
        "saturation",
        "samples/saturation",
        latest("samples/saturation"),
        "samples leave the data's range: less guidance, or an earlier checkpoint",
    ),
    Alarm(
        "diversity",
        "samples/diversity",
        latest("samples/diversity"),
        "seeds of a prompt come to look alike: an earlier checkpoint, less guidance, or a lower learning rate",
        below=True,
    ),
)
"""Alarms of a run that draws grids of samples, relative to its first grid, which is the teacher's if there is one."""
PANELS = (Panel("Diversity over the first grid's", ("samples/diversity",)),)
