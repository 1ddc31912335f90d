"""Given tokens, what comes next: the target, drafters, verification and the loop. No data sets, no training."""
