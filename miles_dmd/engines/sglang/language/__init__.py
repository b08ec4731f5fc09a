"""SGLang's language-model servers as rollout engine: responses with the log-probs of their tokens."""
