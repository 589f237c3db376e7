"""Flags about precision alignment: what a run writes down so that two platforms can be compared."""

from hetero_megatron.cli.flags.flag import count, needs, value

_WATCHES = needs("--dump-layers", "--capture-operators", "--check-operators")

FLAGS = (
    value("--dump-layers", str, None, "write output and gradient of each layer there, of the first micro-batch"),
    value("--capture-operators", str, None, "write arguments, results and gradients of operators there"),
    value("--check-operators", str, None, "compare these operators with their definition in fp64, or: all", nargs="+"),
    value("--align-layers", str, None, "only in these modules, e.g. layers.0. layers.3.mlp", nargs="+", needs=_WATCHES),
    count("--align-steps", 1, "watch so many steps, from the first on", needs=_WATCHES),
)
