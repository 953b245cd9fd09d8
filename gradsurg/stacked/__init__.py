"""Train the seeds and arms of a study as one tensor program."""
