"""Preflight: the resolved run, and refusal of what could not run, before anything is loaded. Knows no torch."""
