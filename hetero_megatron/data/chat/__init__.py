"""Conversations for fine-tuning: records -> messages -> token ids with a loss mask -> packed samples."""

from hetero_megatron.data.chat.build import ChatData
from hetero_megatron.data.chat.conversation import Conversation, read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.chat.packed import PackedConversations
from hetero_megatron.data.chat.stream import StreamedConversations

__all__ = [
    "ChatData",
    "ChatEncoder",
    "Conversation",
    "Encoded",
    "PackedConversations",
    "StreamedConversations",
    "read_conversation",
]
