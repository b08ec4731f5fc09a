"""Version of the package, written into whatever a run leaves."""

VERSION = "0.1.0"
