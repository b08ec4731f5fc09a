"""The words that wings and machinery share: samples, external data, losses, families, engines."""
