"""Language models: token batches, sampling, teacher scores, prompts."""
