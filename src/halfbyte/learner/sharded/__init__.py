"""The learner on several ranks: FSDP2 over the same execution. Imported only where ``torchrun`` has started several."""
