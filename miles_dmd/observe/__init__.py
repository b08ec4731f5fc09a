"""What a run tells: metrics, spans, pictures, tables, a progress bar. Knows no torch; what is heavy loads on use."""
