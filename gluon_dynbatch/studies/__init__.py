"""Studies of a model: every setting run and compared (`tuning`), or simulated without running it (`simulate`)."""
