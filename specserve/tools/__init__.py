"""Commands beside serving: load, plan, diagnose, train and widen."""
