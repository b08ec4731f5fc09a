"""Distil a language model: ``python train_llm.py --loss-type resopd --config trainer_configs/opd_bytes.yaml``."""

from miles_dmd.early import prepare_process
from miles_dmd.streams import leave

if __name__ == "__main__":
    prepare_process("train_llm.py")
    from miles_dmd.run import main

    leave("train_llm.py", main(program="train_llm.py"))
