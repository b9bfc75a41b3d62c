"""Commands beside serving: load, plan, simulate, reproduce, diagnose, train and widen."""
