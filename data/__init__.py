"""Prompts, responses and the store: what the drafter learns from."""
