"""Metrics, spans, pictures, tables, progress. Knows no torch; what is heavy loads on use."""
