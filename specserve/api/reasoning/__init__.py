"""Reasoning that a model writes before its answer: formats, parser and grammars."""
