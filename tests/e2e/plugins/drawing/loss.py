"""dmd2 with noise in both losses."""

import dataclasses

from miles_dmd.losses.dmd2 import loss_type as dmd2

loss_type = dataclasses.replace(dmd2, objectives={role: f"drawing.objective:{role}" for role in dmd2.objectives})
