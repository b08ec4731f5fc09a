"""What a run is asked for: arguments, their flags, presets and rules. Knows no torch."""
