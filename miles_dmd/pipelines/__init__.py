"""Pipeline directories of diffusers: JSON files, weight headers, fingerprints, comparison. No tensor is read."""
