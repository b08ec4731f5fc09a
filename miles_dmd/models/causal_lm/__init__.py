"""Causal language models of transformers, any architecture that AutoModelForCausalLM opens: declaration."""

from miles_dmd.modalities.language.family import LanguageFamily

family = LanguageFamily(
    name="causal_lm",
    torch_module="miles_dmd.models.causal_lm.network",
    capabilities=frozenset({"autoregressive"}),
)
