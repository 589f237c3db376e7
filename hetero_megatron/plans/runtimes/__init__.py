"""Plans in the configuration files of other runtimes, and back: all of them are Megatron's degrees, some less."""
