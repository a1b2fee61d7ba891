"""Live modules: TorchDynamo captures what they compute, Ingot runs its regions."""
