"""The library's face: what ``import hetero_megatron as hm`` offers. The command line is a user of it."""
