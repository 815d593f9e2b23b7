"""Simulators of robots whose tasks are put together by managers: mjlab and Isaac Lab."""
