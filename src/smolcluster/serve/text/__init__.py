"""Conversations to tokens and back."""
