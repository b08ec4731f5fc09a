"""A loss type whose critic trains two roles in one phase."""
