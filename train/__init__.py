"""Distillation: a store's rows -> a drafter with the highest acceptance. Imports conf, inference and data only."""
