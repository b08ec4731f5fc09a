"""Which version of the package this is; written into whatever a run leaves."""

VERSION = "0.1.0"
