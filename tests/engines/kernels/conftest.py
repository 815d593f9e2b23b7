from triton_device import strict_float32

__all__ = ["strict_float32"]
