"""Networks as losses and samplers see them, whatever their family."""
