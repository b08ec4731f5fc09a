"""Arguments of a run: flags, presets and per-trainer overrides. Knows no torch."""
