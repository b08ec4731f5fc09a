"""Distil a diffusion model: ``python train_diffusion.py --loss-type dmd2 --config trainer_configs/digits.yaml``."""

import sys

from miles_dmd.early import stand_by

if __name__ == "__main__":
    stand_by("train_diffusion.py")
    from miles_dmd.run import main

    sys.exit(main())
