"""The command line: flags, their meaning, and the `hetero-megatron` sub-commands. No torch before a run starts."""
