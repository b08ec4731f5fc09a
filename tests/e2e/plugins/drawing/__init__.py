"""Plug-ins that draw from the global generators, as a plug-in of somebody's own may: objective, engine and hook."""

import random


def drawn():
    """A small number that depends on all three generators."""
    import numpy as np
    import torch

    return 1e-3 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
