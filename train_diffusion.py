"""Distil a diffusion model: ``python train_diffusion.py --loss-type dmd2 --config trainer_configs/digits.yaml``."""

from miles_dmd.early import prepare_process
from miles_dmd.streams import leave

if __name__ == "__main__":
    prepare_process("train_diffusion.py")
    from miles_dmd.run import main

    leave("train_diffusion.py", main())
