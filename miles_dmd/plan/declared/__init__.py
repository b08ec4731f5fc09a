"""Contracts that are declared, inspected and fingerprinted; a plan that departs from their defaults is not run."""
