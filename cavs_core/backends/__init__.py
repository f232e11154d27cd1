"""Backends run compiled steps on arrays; see `mxnet_ops.MXNetBackend` for what one must offer."""
