"""The flags of pretrain_gpt.py: the table (table/), the parser, what each group of flags becomes, and the help."""
