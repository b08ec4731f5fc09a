"""Arguments of a run: flags, presets and rules. Knows no torch."""
