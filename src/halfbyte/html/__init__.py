"""What every offline page shares: axes, text made visible, tables, the template environment with its style. No torch."""
