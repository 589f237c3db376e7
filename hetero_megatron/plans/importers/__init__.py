"""Plans out of other programs' formats: Megatron's flags, FlagScale's meshes."""
