"""Loss types: every package is one, declared in its __init__ (no torch), computed in its objective.py."""
