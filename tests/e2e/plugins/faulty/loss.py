"""dmd2, with a place in the phase of the student and one in that of the fake score."""

import dataclasses

from miles_dmd.losses.dmd2 import loss_type as dmd2

objectives = {role: f"faulty.objective:{role}" for role in dmd2.objectives}
loss_type = dataclasses.replace(dmd2, objectives=objectives)
