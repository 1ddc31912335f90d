"""Evaluation: acceptance, speed and losslessness of a drafter, the report, the model card and the hub
folder."""
