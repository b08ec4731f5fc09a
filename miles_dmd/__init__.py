"""miles_dmd: distil a flow-matching teacher into a few-step student with trainer groups over FSDP2."""

__version__ = "0.1.0"
