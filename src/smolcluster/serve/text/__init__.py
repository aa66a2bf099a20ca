"""Conversations to tokens and back.

conversation.py   prompts and messages to tokens, tokens to text
chat_template.py  a model's Jinja template; rendering.py: in a child process with limits
vocabulary.py     tokens and their bytes
"""
