"""Chats of OpenAI clients, which keep the tokens that were sampled."""
