"""Conversations for fine-tuning: records -> messages -> token ids with a loss mask -> packed samples."""
