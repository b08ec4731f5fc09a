"""Modalities: every package is one, declared in its __init__ (no torch)."""
