"""What each kind of drafter is worth: alpha beside what p and q say, a rewriting task by the clock, and what proposals take."""
