"""Training a draft for a frozen target."""
