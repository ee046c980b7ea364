"""Where models come from (packaged, path, Hub, random weights) and what this transformers release looks like to us.

Imports `method`, `kernels`, `metrics` and `common` at most."""
