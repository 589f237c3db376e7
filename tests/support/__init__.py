"""What tests share: pools of ranks, random plans, references to compare with."""
