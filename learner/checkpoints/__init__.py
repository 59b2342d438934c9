"""Everything a learner resumes from."""
