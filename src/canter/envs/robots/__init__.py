"""Manager-based robot simulators: mjlab and Isaac Lab."""
