"""Roles of trainer groups: every file is one, a value that says from where its models are loaded."""
